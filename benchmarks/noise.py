"""What noise costs: drawn when it is needed, drawn ahead, drawn exactly; against a whole round.

    make bench-noise

Fixed: n = 20, f = 4, the trimmed mean, z = 1; medians. Varied: d, and for the exact sampler σ/g. The round at
d = 26,010 is a real one: processes on this machine over gRPC, the paper's CNN, batches of 20 random images (what a
gradient costs does not depend on the pixels). At 1,000,000 only the server's part is timed, so a share there is an
upper bound. Writes ``benchmarks/results/noise.md``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from timing import facts, interleaved, milliseconds

from common.aggregation import make_rule
from common.config import experiment_from
from common.discrete_noise import DiscreteGaussian
from common.learning.datasets import Dataset, Split
from common.noise import NoiseAhead, RoundedGaussian, SecureGaussian
from deploy.local import run_locally
from ps.privacy.released import Unreleased
from ps.reader import RunReader
from ps.release import Mechanism
from ps.store import PreparedRound, RunStore
from ps.update import advance, initial_state, release_round

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "noise.md"
CNN, LARGE = 26_010, 1_000_000
CLIENTS, BYZANTINE = 20, 4
TARGET = 0.05  # of a round at d = 26,010
WARM_UP = 5  # rounds
SIGMA, GRID = 2.0, 2.0**-20  # of a sum at C = 1, z = 1
SCALES = (1e5, 1e6, 1e7)


def images(_root: Path) -> Dataset:
    """Random pixels in the shape of MNIST."""
    random = np.random.default_rng(1)

    def split(count: int) -> Split:
        labels = np.arange(count, dtype=np.int64) % 10
        return Split(random.random((count, 1, 28, 28), dtype=np.float32), labels)

    return Dataset("images", split(4000), split(200), num_classes=10)


class Silent:
    """Looks on and says nothing."""

    def show(self, event: object) -> None: ...

    def tick(self) -> None: ...


def networked_rounds(rounds: int) -> dict[str, float]:
    """Median seconds of a round (``latency``) and of each of its segments, over the network, with DP on."""
    experiment = experiment_from(
        {
            "folder": str(HERE),
            "federation": {"clients": CLIENTS, "byzantine": BYZANTINE, "clients_per_process": CLIENTS},
            "training": {"rounds": rounds + WARM_UP, "batch_size": 20, "learning_rate": 0.01},
            "evaluation": {"every": 10 * rounds, "images": 100},
            "aggregation": {"rule": "trimmed_mean"},
            "privacy": {"epsilon": 20.0, "delta": 1e-3},
            "data": {"dataset": "noise:images", "partition": "iid"},
            "model": {"name": "cnn"},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        ending = run_locally(experiment, Path(folder) / "run", Silent())
        if ending.status != "completed":
            raise SystemExit(f"the run ended as {ending.status}: {ending.message}")
        kept = RunReader(Path(folder) / "run").rounds()[WARM_UP:]
    names = kept[0].segments
    return {"latency": statistics.median(one.latency_s for one in kept)} | {
        name: statistics.median(one.segments[name] for one in kept) for name in names
    }


def costs(d: int, repetitions: int) -> dict[str, float]:
    """Seconds of each way to have a round's noise, and of the parts of a round at the server."""
    source, ahead = SecureGaussian(), NoiseAhead(SecureGaussian())
    mechanism = Mechanism(make_rule("trimmed_mean", num_byzantine=BYZANTINE), CLIENTS, BYZANTINE, 1.0, 1.0)
    rows = torch.from_numpy(np.random.default_rng(2).standard_normal((CLIENTS, d), dtype=np.float32))
    for row in rows:
        mechanism.condition(row)
    box, state, draw = Unreleased(rows), initial_state(torch.zeros(d)), source.standard_normal(d)
    release = {"server_momentum": 0.9, "seed": 1}
    released = release_round(mechanism, state, box, range(CLIENTS), draw, **release)

    found = interleaved(
        {
            "draw": lambda: source.standard_normal(d),
            "round": lambda: RoundedGaussian(draw).on_grid(SIGMA, GRID),
            "release": lambda: release_round(mechanism, state, box, range(CLIENTS), RoundedGaussian(draw), **release),
            "step": lambda: advance(state, released.vector, 0.1, 0.9),
        },
        repetitions,
    )
    waits = []
    for round_id in range(repetitions):
        ahead.start(round_id, d)
        while not ahead._drawn[0].vector.done():
            time.sleep(0.002)
        waits.append(_seconds(lambda round_id=round_id: ahead.take(round_id, d)))
    found["take"] = statistics.median(waits)
    return found | {"commit": commit(d, repetitions)}


def commit(d: int, repetitions: int) -> float:
    """Seconds to make θ and R durable."""
    vector = np.zeros(d, dtype=np.float32)
    with tempfile.TemporaryDirectory() as folder:
        store, _ = RunStore.create(
            Path(folder) / "run", run_id="bench", configuration={}, fingerprint="", genesis_json="{}", theta=vector
        )
        with store:
            return statistics.median(
                _seconds(lambda t=t: store.commit(PreparedRound(t, vector, vector, "{}")))
                for t in range(1, repetitions + 2)
            )


def exact(repetitions: int, d: int = 2000) -> dict[float, float]:
    """Seconds per coordinate of the exact sampler, for each σ/g."""
    return {
        scale: seconds / d
        for scale, seconds in zip(
            SCALES,
            interleaved(
                {f"{s:g}": lambda s=s: DiscreteGaussian(d).on_grid(s * GRID, GRID) for s in SCALES}, repetitions
            ).values(),
            strict=True,
        )
    }


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def server_row(d: int, found: dict[str, float]) -> tuple[str, ...]:
    """The line of one d; the release rounds its noise, so that is in the server's time already."""
    server = found["release"] + found["step"] + found["commit"]
    return (
        f"{d:,}",
        *(milliseconds(seconds) for seconds in (found["draw"], found["take"], found["round"], server)),
        percent(found["take"] + found["round"], server + found["take"]),
        percent(found["draw"] + found["round"], server + found["draw"]),
    )


def table(head: tuple[str, ...], *rows: tuple[str, ...]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows)]


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2g} %"


def report(rounds: int, repetitions: int) -> str:
    """The page that is written."""
    before = os.getloadavg()[0]
    network, small, large = networked_rounds(rounds), costs(CNN, repetitions), costs(LARGE, max(3, repetitions // 2))
    sampler = exact(repetitions)
    latency = network["latency"]
    ahead, in_line = network["noise"] + small["round"], small["draw"] + small["round"]
    verdict = "met" if max(ahead, in_line) < TARGET * latency else "**missed**"
    segments = ", ".join(f"{name} {milliseconds(network[name])}" for name in network if name != "latency")
    lines = [
        "# Noise",
        "",
        f"`make bench-noise`: n = {CLIENTS}, f = {BYZANTINE}, the trimmed mean, medians.",
        "Ratios travel; milliseconds do not.",
        "",
        *(f"- {name}: {value}" for name, value in facts().items()),
        f"- load average before and after: {before:.1f}, {os.getloadavg()[0]:.1f} (the benchmark's own load is 1 to 2)",
        "",
        "## Against a round of the federation, d = 26,010",
        "",
        f"{rounds} rounds over gRPC between processes of one machine, client gradients included:",
        f"{milliseconds(latency)} ms each, of which {segments} ms.",
        "Rounding to the grid is part of the segment *aggregate*, and is counted as noise here.",
        "",
        *table(
            ("noise", "ms", "share of the round (target: below 5 %)"),
            ("drawn ahead, as the server does: wait, round", milliseconds(ahead), percent(ahead, latency)),
            ("drawn when it is needed: draw, round", milliseconds(in_line), percent(in_line, latency)),
        ),
        "",
        f"Target {verdict}.",
        "",
        "## Against the server's part alone: release, step, commit",
        "",
        *table(
            ("d", "draw, ms", "take from ahead, ms", "round, ms", "server, ms", "share, ahead", "share, when needed"),
            *(server_row(d, found) for d, found in ((CNN, small), (LARGE, large))),
        ),
        "",
        '## Exact noise (`privacy.noise = "discrete"`)',
        "",
        "Drawn in the round, on one thread, each coordinate by itself: the cost is linear in d.",
        "",
        *table(
            ("σ/g", "µs a coordinate", f"s at d = {CNN:,}", "in networked rounds", "times the normals"),
            *(
                (
                    f"{scale:.0e}",
                    f"{seconds * 1e6:.0f}",
                    f"{seconds * CNN:.2f}",
                    f"{seconds * CNN / latency:.1f}",
                    f"{seconds * CNN / small['draw']:,.0f}",
                )
                for scale, seconds in sampler.items()
            ),
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="of the networked run")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    page = report(given.rounds, given.repetitions)
    print(page)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(page)


if __name__ == "__main__":
    main()
