"""What a misbehaviour costs the others: the latency of rounds, the server's memory, and what was refused.

    make bench-misbehaviour

A parameter server, a process with the honest clients, and an adversary's process, which is left so much of one core
(a control group where that is allowed, nice 19 elsewhere). Beside each run there is its control, in turn: the
adversary's identities behave, and one more process burns as much of the processor as the adversary was seen to use,
under the same limit, without touching the server. The first third of the rounds does not count. Writes
``benchmarks/results/misbehaviour.md`` and ``.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from process_facts import Watch, usage
from scale_task import MODEL
from timing import facts

from adversary.misbehaviour import MISBEHAVIOURS
from common.config import Experiment, experiment_from
from common.learning.datasets import Dataset, Split
from deploy.chaos.squeezing import Squeezer
from deploy.processes import child_context
from ps.reader import RunReader

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "misbehaviour.md"
CLIENTS, BYZANTINE, ROUNDS = 8, 2, 60
SETTLED = ROUNDS // 3
"""The rounds before do not count: in them an identity may cost what the server's patience allows it."""
SHARE = 0.25
TARGET = 1.5
BUDGET_S = 330.0
WAIT_S = 60.0
NOTHING = "none"
MIB = 1 << 20
OWN: dict[str, dict[str, Any]] = {
    "crash": {"at_round": 5},
    "oversize": {"megabytes": 100.0},
}
"""Parameters that differ from the defaults, so that a run is long enough for what is done."""


def blank(_root: Path) -> Dataset:
    """Nothing to learn, so that nothing but the exchange costs anything; d = 26,010, as the ByzULDP paper's CNN."""
    split = Split(np.zeros((4 * CLIENTS, 26_010), dtype=np.float32), np.arange(4 * CLIENTS, dtype=np.int64) % 2)
    return Dataset("blank", split, split, num_classes=2)


def experiment_of(name: str) -> Experiment:
    """Eight clients of whom the last two misbehave, d = 26,010."""
    given = {key: value for key, value in OWN.get(name, {}).items() if name in MISBEHAVIOURS}
    return experiment_from(
        {
            "federation": {"clients": CLIENTS, "byzantine": BYZANTINE, "quorum": CLIENTS - BYZANTINE},
            "training": {"rounds": ROUNDS, "batch_size": 1, "learning_rate": 0.1},
            "evaluation": {"every": 1_000_000},
            "aggregation": {"rule": "trimmed_mean"},
            "attack": {"name": "bit_flip"},
            "misbehaviour": {"name": name, **given},
            "data": {"dataset": "misbehaviour:blank", "partition": "iid"},
            "model": {"name": MODEL},
            "network": {
                "join_grace_s": 1.0,
                "grace_floor_s": 0.2,
                "patience_s": 1.0,
                "leave_deadline_s": 0.5,
                "server_gone_s": 10.0,
            },
            "monitoring": {"status": ""},
        }
    )


# ---------------------------------------------------------------- in the children


def serve(experiment: Experiment, run_dir: Path, said: Path) -> None:
    from ps.main import run_parameter_server

    def report(event: Mapping[str, Any]) -> None:
        if event["event"] == "listening":
            said.with_suffix(".part").write_text(json.dumps(event))
            said.with_suffix(".part").rename(said)

    run_parameter_server(experiment, run_dir, report=report)


def take_part(experiment: Experiment, address: str, tokens: dict[int, str]) -> None:
    from client.main import run_client

    run_client(experiment, address=address, tokens=tokens)


def attack(experiment: Experiment, address: str, tokens: dict[int, str]) -> None:
    from adversary.main import run_adversary

    run_adversary(experiment, address=address, tokens=tokens)


def burn(share: float) -> None:
    """Use this much of a core, in slices of a hundredth of a second."""
    while True:
        begun = time.perf_counter()
        while time.perf_counter() - begun < 0.01 * share:
            pass
        time.sleep(0.01 * (1 - share))


def _child(target: Callable[..., None], log: Path, *arguments: Any) -> None:
    sys.path[:0] = [str(HERE)]
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    target(*arguments)


# ---------------------------------------------------------------- a run


@dataclass
class Run:
    """What there is to see of one run."""

    latencies_s: list[float]
    """Of the rounds that count."""
    rounds: int
    grown: int
    allowed: int
    burnt: float
    """Share of a core that the adversary used."""
    server_cpu: float
    refused: dict[str, dict[str, int]] = field(default_factory=dict)
    """Of honest clients, adversaries and strangers, by kind."""


def run(name: str, share: float, burning: float | None = None) -> Run:
    """One run to its end; ``burning`` is what a further process burns meanwhile."""
    experiment = experiment_of(name)
    with tempfile.TemporaryDirectory(prefix="byzuldp-") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        squeezer = Squeezer()

        def start(target: Callable[..., None], *arguments: Any) -> Any:
            log = folder / f"{target.__name__}.log"
            process = child_context("forkserver").Process(target=_child, args=(target, log, *arguments), daemon=True)
            process.start()
            stack.callback(_end, process)
            return process

        said, run_dir = folder / "said.json", folder / "run"
        server = start(serve, experiment, run_dir, said)
        _until(said.exists, "the server to listen")
        listening = json.loads(said.read_text())
        watch = Watch(server.pid, 0.1)
        stack.callback(watch.stop)
        stored = json.loads((run_dir / "operator" / "join_tokens.json").read_text())
        honest = {i: stored[str(i)] for i in experiment.honest_ids}
        byzantine = {i: stored[str(i)] for i in experiment.adversary_ids}
        clients = start(take_part, experiment, listening["address"], honest)
        adversary = start(attack, experiment, listening["address"], byzantine)
        if burning is None:
            squeezer.squeeze(adversary.pid, share)
        elif burning > 0:
            squeezer.squeeze(start(burn, min(burning, 1.0)).pid, share)
        stack.callback(squeezer.close)
        begun, server_before = time.perf_counter(), usage(server.pid).cpu_s
        first = last = usage(adversary.pid).cpu_s
        while server.is_alive() and time.perf_counter() - begun < WAIT_S:
            with contextlib.suppress(OSError, KeyError):
                last = usage(adversary.pid).cpu_s
            if not clients.is_alive() and clients.exitcode:
                raise SystemExit((folder / "take_part.log").read_text())
            server.join(0.05)
        took = time.perf_counter() - begun
        records = RunReader(run_dir).rounds()
        return Run(
            latencies_s=[record.latency_s for record in records[SETTLED:]],
            rounds=len(records),
            grown=watch.peak.uss - watch.first.uss,
            allowed=listening["memory_bytes"],
            burnt=max(0.0, last - first) / took,
            server_cpu=(watch.peak.cpu_s - server_before) / took,
            refused=_refused(run_dir, experiment),
        )


def _refused(run_dir: Path, experiment: Experiment) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {"honest": Counter(), "adversaries": Counter(), "strangers": Counter()}
    for refusal in RunReader(run_dir).refusals():
        whose = (
            "strangers"
            if refusal.client_id is None
            else "honest"
            if refusal.client_id in experiment.honest_ids
            else "adversaries"
        )
        found[whose][refusal.kind] += refusal.count
    return {whose: dict(sorted(kinds.items())) for whose, kinds in found.items() if kinds}


def _end(process: Any) -> None:
    process.kill()
    process.join()


def _until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > give_up:
            raise SystemExit(f"waited {WAIT_S:.0f} s in vain for {what}")
        time.sleep(0.01)


# ---------------------------------------------------------------- all of them


@dataclass
class Row:
    """A misbehaviour's runs and their controls."""

    name: str
    runs: list[Run] = field(default_factory=list)
    controls: list[Run] = field(default_factory=list)

    def latency_ms(self, runs: list[Run], quantile: float) -> float:
        every = sorted(latency for one in runs for latency in one.latencies_s)
        return 1000 * every[min(len(every) - 1, int(quantile * len(every)))] if every else float("nan")

    @property
    def ratio(self) -> float:
        """Of medians."""
        return self.latency_ms(self.runs, 0.5) / self.latency_ms(self.controls, 0.5)

    @property
    def met(self) -> bool:
        complete = all(one.rounds == ROUNDS for one in self.runs)
        return complete and self.ratio <= TARGET and max(one.grown for one in self.runs) <= self.runs[0].allowed


def measured(names: list[str], repetitions: int, share: float) -> Iterator[Row]:
    """Run, control, run, control, …; repetitions stop when the time is over."""
    begun = time.monotonic()
    rows = {name: Row(name) for name in names}
    run(NOTHING, share, 0.0)  # what is read and compiled once
    for repetition in range(repetitions):
        for row in rows.values():
            if repetition and time.monotonic() - begun > BUDGET_S:
                break
            row.runs.append(run(row.name, share))
            row.controls.append(run(NOTHING, share, row.runs[-1].burnt))
            print(
                f"{row.name:24} {row.latency_ms(row.runs[-1:], 0.5):7.1f} ms, control "
                f"{row.latency_ms(row.controls[-1:], 0.5):7.1f} ms, adversary {row.runs[-1].burnt:.2f} and server "
                f"{row.runs[-1].server_cpu:.2f} (control {row.controls[-1].server_cpu:.2f}) of a core, "
                f"{row.runs[-1].grown / MIB:.1f} MiB, {row.runs[-1].refused}",
                flush=True,
            )
    yield from rows.values()


def table(rows: list[Row], share: float, load: tuple[float, float]) -> str:
    lines = [
        "# Misbehaviours",
        "",
        f"`make bench-misbehaviour`: n = {CLIENTS}, f = {BYZANTINE}, the trimmed mean, d = 26,010, {ROUNDS} rounds of",
        f"which the first third does not count; the adversary's process has at most {share:g} of a core. Beside each",
        "run, in turn, a control: identities that behave, and a process that burns as much beside the server.",
        "Ratios travel; milliseconds do not.",
        "",
        *(f"- {name}: {value}" for name, value in facts().items()),
        f"- load average before and after: {load[0]:.1f}, {load[1]:.1f}",
        "",
        "| misbehaviour | CPU burnt | median, ms (control) | ratio | p95, ms (control) | MiB (allowed) | refused |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        runs, controls = row.runs, row.controls
        refused = "; ".join(
            f"{whose}: " + ", ".join(f"{kind} {count:,}" for kind, count in kinds.items())
            for whose, kinds in runs[-1].refused.items()
        )
        complete = min(one.rounds for one in runs)
        short = "" if complete == ROUNDS else f" (only {complete} rounds)"
        lines.append(
            f"| {row.name} | {statistics.mean(one.burnt for one in runs):.2f} | "
            f"{row.latency_ms(runs, 0.5):.1f} ({row.latency_ms(controls, 0.5):.1f}) | "
            f"{row.ratio:.2f}{'' if row.met else ' **missed**'}{short} | "
            f"{row.latency_ms(runs, 0.95):.0f} ({row.latency_ms(controls, 0.95):.0f}) | "
            f"{max(one.grown for one in runs) / MIB:.1f} ({runs[0].allowed / MIB:.0f}) | {refused or 'none'} |"
        )
    missed = [row.name for row in rows if not row.met]
    verdict = "met by all" if not missed else f"missed by {', '.join(missed)}"
    return "\n".join(
        [*lines, "", f"Target: a ratio of at most {TARGET:g}, and memory within the formula: {verdict}.", ""]
    )


def earlier(output: Path) -> list[Row]:
    """The rows of the last run."""
    path = output.with_suffix(".json")
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return [
        Row(row["name"], [Run(**one) for one in row["runs"]], [Run(**one) for one in row["controls"]]) for row in stored
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="these misbehaviours; the others keep the rows that they have")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--share", type=float, default=SHARE, help="of a core, for the adversary")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    rows = list(measured(arguments.only or list(MISBEHAVIOURS), arguments.repetitions, arguments.share))
    if arguments.only:
        again = {row.name: row for row in rows}
        rows = [again.pop(row.name, row) for row in earlier(arguments.output)] + list(again.values())
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(table(rows, arguments.share, (before, os.getloadavg()[0])))
    arguments.output.with_suffix(".json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(arguments.output.read_text())


if __name__ == "__main__":
    main()
