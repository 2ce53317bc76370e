"""Which attack breaks which rule: accuracy of short runs in one process, without privacy.

    make bench-attacks

Fixed: n = 20, f = 4 adversaries, MNIST, a network with one hidden layer of 32 (25,450 parameters), 80 rounds, batches
of 10, C = 1, η = 0.5, momenta 0.9 (clients) and 0.5 (server), 2,000 test images after the last round. Attacks that need
an estimate of honest momenta are omniscient, the others know nothing. Varied: the attack, the partition and the seed,
for the mean and the trimmed mean; and, with ten shards per client and seed 0, the other rules.

A run that is in ``benchmarks/results/attacks.csv`` is not run again, so the benchmark may be stopped at any time; every
run is added as it ends. The tables are in ``benchmarks/results/attacks.md``.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from adversary.attacks import ATTACKS
from common.aggregation import RULES
from common.config import Experiment, experiment_from
from common.errors import RunFailed
from common.learning.gradient import accuracy
from common.learning.task import build_task
from deploy.simulation import simulate

HERE = Path(__file__).resolve().parent
CSV, TABLES = HERE / "results" / "attacks.csv", HERE / "results" / "attacks.md"
CLIENTS, BYZANTINE, ROUNDS, IMAGES = 20, 4, 80, 2000
SEEDS = (0, 1)
BROKEN = 0.2  # of accuracy lost: "breaks"

PARTITIONS: dict[str, dict[str, Any]] = {
    "iid": {"partition": "iid"},
    "ten shards": {"partition": "shards", "shards_per_client": 10},
    "two classes": {"partition": "classes", "classes_per_client": 2},
}
MAIN_RULES = ("mean", "trimmed_mean")
NNM = "nearest_neighbor_mixing + trimmed_mean"
OTHER_RULES = (*sorted(RULES.keys() - {*MAIN_RULES, "weighted_mean"}), NNM)
EVERY_RULE_ON = "ten shards"

VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in ATTACKS},
    "alie, optimised": {"name": "alie", "z": "optimised"},
    "ipm, optimised": {"name": "ipm", "epsilon": "optimised"},
    "bit_flip, of norm C": {"name": "bit_flip", "scale_to_clip_norm": True},
}


def small_net(input_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """One hidden layer: cheap enough for hundreds of runs."""
    channels, height, width = input_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, 32), nn.Tanh(), nn.Linear(32, num_classes))


@dataclass(frozen=True)
class Case:
    """One run."""

    attack: str
    partition: str
    rule: str
    seed: int
    rounds: int = ROUNDS


@dataclass(frozen=True)
class Row:
    """A case and what came of it; a run that diverged has the accuracy of its last finite model."""

    attack: str
    partition: str
    rule: str
    seed: int
    rounds: int
    knowledge: str
    accuracy: float
    ended: str
    cpu_s: float

    @property
    def case(self) -> Case:
        return Case(self.attack, self.partition, self.rule, self.seed, self.rounds)


def cases() -> Iterator[Case]:
    """All runs, the most telling ones first."""
    for seed in SEEDS:
        for partition in PARTITIONS:
            for rule in MAIN_RULES:
                for attack in VARIANTS:
                    yield Case(attack, partition, rule, seed)
        if seed == SEEDS[0]:
            for rule in OTHER_RULES:
                for attack in VARIANTS:
                    yield Case(attack, EVERY_RULE_ON, rule, seed)


def experiment_of(case: Case) -> Experiment:
    attack = VARIANTS[case.attack]
    *before, rule = case.rule.split(" + ")
    return experiment_from(
        {
            "federation": {"clients": CLIENTS, "byzantine": BYZANTINE},
            "training": {
                "rounds": case.rounds,
                "batch_size": 10,
                "learning_rate": 0.5,
                "client_momentum": 0.9,
                "server_momentum": 0.5,
                "seed": case.seed,
                "device": "cpu",
            },
            "aggregation": {"rule": rule, **({"before": before} if before else {})},
            "attack": {**attack, "knowledge": "omniscient" if needs_estimate(attack) else "none"},
            "data": {"dataset": "mnist", **PARTITIONS[case.partition]},
            "model": {"name": "attacks:small_net"},
            "folder": str(HERE),
        }
    )


def needs_estimate(attack: dict[str, Any]) -> bool:
    return ATTACKS[attack["name"]].needs_estimate


def run(case: Case) -> Row:
    began = time.process_time()
    experiment = experiment_of(case)
    task = build_task(experiment)
    ended, theta = "completed", task.model.parameters_flat().clone()
    try:
        for done in simulate(experiment, task=task):
            theta = done.theta
    except RunFailed:
        ended = "diverged"
    task.model.set_parameters(theta)
    reached, _ = accuracy(task.model, task.dataset.test, task.dataset, IMAGES)
    spent = round(time.process_time() - began, 2)
    return Row(**asdict(case), knowledge=experiment.attack.knowledge, accuracy=reached, ended=ended, cpu_s=spent)


def stored(path: Path) -> dict[Case, Row]:
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        rows = [
            Row(
                attack=item["attack"],
                partition=item["partition"],
                rule=item["rule"],
                seed=int(item["seed"]),
                rounds=int(item["rounds"]),
                knowledge=item["knowledge"],
                accuracy=float(item["accuracy"]),
                ended=item["ended"],
                cpu_s=float(item["cpu_s"]),
            )
            for item in csv.DictReader(file)
        ]
    return {row.case: row for row in rows}


def tables(rows: dict[Case, Row]) -> str:
    """The results in Markdown."""
    spent = sum(row.cpu_s for row in rows.values()) / 60
    every, main = [*MAIN_RULES, *OTHER_RULES], [(part, rule) for part in PARTITIONS for rule in MAIN_RULES]
    conditions = (
        f"`make bench-attacks`: n = {CLIENTS}, f = {BYZANTINE}, no privacy, MNIST, a network with one hidden layer "
        f"(25,450 parameters), {ROUNDS} rounds, batches of 10, C = 1, η = 0.5, client momentum 0.9, server momentum "
        f"0.5. Test accuracy in % after the last round, on {IMAGES:,} images. Attacks that need an estimate of honest "
        "momenta are omniscient, the others know nothing; parameters are the defaults unless named. **Bold**: at "
        f"least {100 * BROKEN:.0f} points below the same rule without an attack (row *none*, in which all {CLIENTS} "
        "clients are honest). Without privacy the server does not clip, so one long vector is enough to break a mean. "
        f"{len(rows)} of {len(list(cases()))} runs; {spent:.0f} CPU minutes."
    )
    text = [
        "# Attacks against rules",
        conditions,
        "## The mean and the trimmed mean, three partitions",
        f"Mean of seeds {', '.join(map(str, SEEDS))}, ± half the distance between them.",
        _table(rows, [(f"{part}: {short(rule)}", part, rule) for part, rule in main], SEEDS),
        f"## Every rule, {EVERY_RULE_ON}, seed {SEEDS[0]}",
        _table(rows, [(short(rule), EVERY_RULE_ON, rule) for rule in every], SEEDS[:1]),
    ]
    return "\n\n".join(text) + "\n"


def _table(rows: dict[Case, Row], columns: list[tuple[str, str, str]], seeds: tuple[int, ...]) -> str:
    lines = [f"| attack | {' | '.join(title for title, _, _ in columns)} |", "| --- |" + " --- |" * len(columns)]
    for attack in sorted(VARIANTS, key=lambda name: (name != "none", name)):
        cells = [cell(rows, attack, partition, rule, seeds) for _, partition, rule in columns]
        lines.append(f"| {attack} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(rows: dict[Case, Row], attack: str, partition: str, rule: str, seeds: tuple[int, ...]) -> str:
    found = [rows.get(Case(attack, partition, rule, seed)) for seed in seeds]
    reached = [row.accuracy for row in found if row is not None]
    if not reached:
        return "…"
    calm = [row.accuracy for seed in seeds if (row := rows.get(Case("none", partition, rule, seed))) is not None]
    mean = statistics.fmean(reached)
    apart = f" ±{50 * (max(reached) - min(reached)):.0f}" if len(reached) > 1 else ""
    text = f"{100 * mean:.0f}{apart}"
    return f"**{text}**" if calm and statistics.fmean(calm) - mean >= BROKEN else text


def short(rule: str) -> str:
    return {NNM: "NNM + trimmed mean"}.get(rule, rule.replace("_", " "))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="only write the tables again")
    arguments = parser.parse_args()
    rows = stored(CSV)
    if not arguments.table:
        missing = [case for case in cases() if case not in rows]
        CSV.parent.mkdir(exist_ok=True)
        for number, case in enumerate(missing, start=1):
            row = run(case)
            rows[case] = row
            fresh = not CSV.is_file()
            with CSV.open("a", newline="") as file:
                writer = csv.writer(file)
                if fresh:
                    writer.writerow([field.name for field in fields(Row)])
                writer.writerow(astuple(row))
            print(f"{number}/{len(missing)}", json.dumps(asdict(row)), flush=True)
            if number % 36 == 0:
                TABLES.write_text(tables(rows), encoding="utf-8")
    TABLES.write_text(tables(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
