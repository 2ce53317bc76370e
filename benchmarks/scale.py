"""A thousand clients: what a round costs beside a bare echo of the same bytes.

    make bench-scale

A parameter server in a process of its own, and real connections: one for each client, hosted by a few driver processes
that train nothing (:mod:`scale_load`). Every round is a full one: the models go down, the momenta come up, the trimmed
mean, secret noise, a durable commit. Before and after it, the same driver processes exchange the same bytes with a
bare grpc.aio server over as many connections with the same options, in the same number of calls and in a single one.
Writes ``benchmarks/results/scale.md`` and ``scale.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from process_facts import Usage, Watch, usage
from scale_load import raise_file_limit
from scale_report import as_json, page
from scale_task import MODEL, SIZES

from common.config import Experiment, experiment_from
from ps.limits import Memory, limits_of, memory_of
from ps.reader import RunReader

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "scale.md"
WARM_UP = 3  # rounds that do not count, of a run and of an echo
SPARE_FILES = 100
DEADLINE_S = 600.0  # of anything a child is asked to do
SHAPES = ("calls", "stream")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GRPC_ENABLE_FORK_SUPPORT": "0"}

Message = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    clients: int
    data: str
    rounds: int
    processes: int = 2
    echo_rounds: int = 10
    """That count, of each shape, before and after; 0 for no echo."""
    epsilon: float = 10.0
    delta: float = 1e-5
    seed: int = 1

    @property
    def d(self) -> int:
        return SIZES[self.data]

    @property
    def byzantine(self) -> int:
        return self.clients // 20

    def experiment(self) -> Experiment:
        """Everything that is not named here is at its default: deadlines, liveness, graces, chunks."""
        return experiment_from(
            {
                "folder": str(HERE),
                "federation": {"clients": self.clients, "byzantine": self.byzantine},
                "training": {"rounds": self.rounds, "learning_rate": 1.0, "server_momentum": 0.9},
                "evaluation": {"every": self.rounds + 1},
                "aggregation": {"rule": "trimmed_mean"},
                "privacy": {"epsilon": self.epsilon, "delta": self.delta},
                "data": {"dataset": f"scale_task:{self.data}", "partition": "iid"},
                "model": {"name": MODEL},
                "network": {"heartbeat_s": 5.0},
            }
        )


@dataclass
class Measured:
    """What one setting gave; times in seconds, sizes in bytes."""

    setting: Setting
    formula: Memory
    """What docs/limits.md says the parameter server needs at most."""
    latency: list[float] = field(default_factory=list)
    segments: dict[str, float] = field(default_factory=dict)
    answers: int = 0
    """Momenta that counted, in all rounds."""
    echo: dict[str, list[float]] = field(default_factory=lambda: {shape: [] for shape in SHAPES})
    """Rounds of the bare echo, of either shape, those before the run and those after it."""
    echo_cpu_s: dict[str, float] = field(default_factory=dict)
    """Of the echo's server, a round."""
    echo_driver_cpu_s: dict[str, float] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    idle: Usage | None = None
    peak: Usage | None = None
    joined_s: float = 0.0
    ps_cpu_s: float = 0.0
    """Of the parameter server, a round."""
    driver_cpu_s: float = 0.0


class Child:
    """A script of this folder; one JSON object a line, both ways."""

    def __init__(self, script: str, log: Path) -> None:
        self._script = script
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **ENVIRONMENT},
            )
        self._log, self._answers = log, queue.Queue[str]()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, message: Message) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Message:
        """Its next line.

        Raises
        ------
        SystemExit
            It ended, or says nothing.
        """
        try:
            line = self._answers.get(timeout=DEADLINE_S)
        except queue.Empty:
            line = ""
        if not line:
            raise SystemExit(f"{self._script} does not answer; its log is\n{self._log.read_text()[-4000:]}")
        found: Message = json.loads(line)
        return found

    def end(self) -> None:
        """It ends when there is nothing more to read, or is killed."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reading.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")


@contextmanager
def child(script: str, log: Path) -> Iterator[Child]:
    process = Child(script, log)
    try:
        yield process
    finally:
        process.end()


def measure(setting: Setting, folder: Path) -> Measured:
    """Echo, federation, echo: with the same driver processes."""
    needed = setting.clients + SPARE_FILES
    if (possible := raise_file_limit()) < needed:
        raise SystemExit(
            f"{setting.clients} connections need {needed} open files in one process, {possible} may be: raise the hard "
            "limit (ulimit -Hn, or LimitNOFILE= of a systemd unit)"
        )
    experiment = setting.experiment()
    network = experiment.network
    found = Measured(setting, memory_of(experiment, setting.d, limits_of(network, setting.clients)))
    with ExitStack() as resources:
        log = folder / "log"
        drivers = [resources.enter_context(child("scale_load.py", log)) for _ in range(setting.processes)]
        edges = [round(setting.clients * k / setting.processes) for k in range(setting.processes + 1)]
        for driver, first, last in zip(drivers, edges, edges[1:], strict=False):
            shape = {"first": first, "last": last, "d": setting.d, "chunk_bytes": network.chunk_bytes}
            driver.tell({**shape, "seed": setting.seed})
        for driver in drivers:
            driver.answer()
        echo(setting, found, drivers, log, network.chunk_bytes)
        federation(setting, found, drivers, experiment, folder, log)
        echo(setting, found, drivers, log, network.chunk_bytes)
    return found


def echo(setting: Setting, found: Measured, drivers: Sequence[Child], log: Path, chunk_bytes: int) -> None:
    """Rounds of the bare echo in both shapes, without the first ones."""
    rounds = setting.echo_rounds + WARM_UP + 1
    for shape in SHAPES if setting.echo_rounds else ():
        with child("scale_servers.py", log) as server:
            size = {"clients": setting.clients, "d": setting.d, "rounds": rounds, "chunk_bytes": chunk_bytes}
            server.tell({"be": "echo", **size})
            address = server.answer()["address"]
            before, drivers_before = usage(server.pid).cpu_s, sum(usage(driver.pid).cpu_s for driver in drivers)
            for driver in drivers:
                driver.tell({"do": "echo", "address": address, "rounds": rounds, "shape": shape})
            for driver in drivers:
                found.lost += [f"echo: {problem}" for problem in driver.answer()["lost"]]
            found.echo_cpu_s[shape] = (usage(server.pid).cpu_s - before) / rounds
            spent = sum(usage(driver.pid).cpu_s for driver in drivers) - drivers_before
            found.echo_driver_cpu_s[shape] = spent / rounds
            server.tell({"do": "stop"})
            times = server.answer()["complete_at"][WARM_UP:]
        found.echo[shape] += [later - earlier for earlier, later in pairwise(times)]


def terms_of(experiment: Experiment, listening: Message) -> Message:
    """What the drivers have to know of a parameter server that listens."""
    return {
        "address": listening["address"],
        "chunk_bytes": experiment.network.chunk_bytes,
        "fingerprint": experiment.fingerprint(),
        "schema_hash": listening["schema_hash"],
        "tokens": listening["tokens"],
    }


def federation(
    setting: Setting, found: Measured, drivers: Sequence[Child], experiment: Experiment, folder: Path, log: Path
) -> None:
    """A run of the parameter server, from its start to its summary."""
    run_dir = folder / "run"
    with child("scale_servers.py", log) as server:
        server.tell({"be": "ps", "experiment": experiment.model_dump(mode="json"), "run_dir": str(run_dir)})
        listening = server.answer()
        watch = Watch(server.pid)
        terms = terms_of(experiment, listening)
        cpu_before = sum(usage(driver.pid).cpu_s for driver in drivers)
        began = time.time()
        for driver in drivers:
            driver.tell({"do": "federation", **terms})
        answers = [driver.answer() for driver in drivers]
        found.driver_cpu_s = (sum(usage(driver.pid).cpu_s for driver in drivers) - cpu_before) / setting.rounds
        found.idle, found.peak = watch.first, watch.stop()
        summary = server.answer()
    cpu_s = summary["cpu_s"]
    found.ps_cpu_s = (cpu_s[-1] - cpu_s[0]) / max(1, len(cpu_s) - 1) if cpu_s else 0.0
    found.lost += [problem for answer in answers for problem in answer["lost"]]
    if summary["status"] != "completed":
        found.lost.append(f"the run ended as {summary['status']}: {summary['message']}")
    if summary["refusals"]:
        found.lost.append(f"refusals: {summary['refusals']}")
    records = RunReader(run_dir).rounds()
    if len(records) != setting.rounds:
        found.lost.append(f"{len(records)} rounds of {setting.rounds}")
    found.lost += [f"round {one.round_id}: {len(one.missing)} missing" for one in records if one.missing]
    found.answers = sum(one.answered for one in records)
    if records:
        found.joined_s = records[0].started_at - began
        counted = records[WARM_UP:] or records
        found.latency = [one.latency_s for one in counted]
        found.segments = {
            name: statistics.median(one.segments[name] for one in counted) for name in records[0].segments
        }


STANDARD = (Setting(1000, "paper", rounds=50), Setting(100, "million", rounds=23))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, help="measure this instead of both settings of the page")
    parser.add_argument("--data", choices=SIZES, default="paper", help="with --clients: what d is")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--processes", type=int, default=2, help="that host the clients")
    parser.add_argument(
        "--out", type=Path, help=f"default {RESULT.relative_to(HERE.parent)}, unless something is given"
    )
    given = parser.parse_args()
    settings = STANDARD if given.clients is None else (Setting(given.clients, given.data, 50),)
    settings = tuple(replace(one, processes=given.processes, rounds=given.rounds or one.rounds) for one in settings)
    out = given.out or (RESULT if settings == STANDARD else None)
    began, load, found = time.time(), os.getloadavg(), []
    for setting in settings:
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(setting, Path(folder)))
    text = page(found, command=" ".join(["python", *sys.argv]), began=began, load=load)
    print(text)
    if any(one.lost for one in found):
        raise SystemExit("something was lost, see above: nothing is written")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
        out.with_suffix(".json").write_text(json.dumps(as_json(found, began=began, load=load), indent=1) + "\n")


if __name__ == "__main__":
    main()
