"""Round latency beside Flower and beside a bare echo of the same bytes, in one run on this machine.

    make bench-latency                                     (all rows, under ten minutes)
    python benchmarks/latency.py --only 20x10000000        (one row anew; the others stay as they are in latency.json)

For every (n, d): our rounds, the echoes, Flower, the echoes, our rounds, so that whatever else the machine does falls
on all alike. Ours are whole rounds: the trimmed mean, noise at a stated ε, a durable commit. There is one process a
client everywhere, and no training in any. Writes ``benchmarks/results/latency.md`` and ``latency.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from latency_flower import PYTHON
from latency_peers import CURRENT, LEGACY, interpreter
from latency_report import page
from process_facts import usage
from scale import Child, child, terms_of

from deploy.bench.asked import Load, Setting
from deploy.bench.machine import machine
from ps.reader import RunReader

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "latency.md"
WARM_UP = 3  # rounds of anything that do not count
SHAPES = ("calls", "stream", "unary")
CONNECT_S = 60.0


@dataclass(frozen=True)
class Row:
    """What is measured, and how many rounds count each time: ours and the echoes' twice, Flower's once."""

    clients: int
    dimension: int
    rounds: int
    echo_rounds: int
    flower_rounds: int
    superlink_rounds: int = 0
    """Of the current Flower; it takes seconds a round whatever d is, so where d is smallest."""

    @property
    def name(self) -> str:
        return f"{self.clients}x{self.dimension}"

    @property
    def setting(self) -> Setting:
        return Setting(
            clients=self.clients,
            dimension=self.dimension,
            byzantine=self.clients // 5,
            rounds=self.rounds,
            warm_up=WARM_UP,
            processes=self.clients,
            rule="trimmed_mean",
            epsilon=10.0,
            delta=1e-5,
            load=Load(seed=1),
        )


ROWS = (
    Row(20, 26_010, rounds=100, echo_rounds=60, flower_rounds=60, superlink_rounds=2),
    Row(20, 1_000_000, rounds=25, echo_rounds=15, flower_rounds=15),
    Row(20, 10_000_000, rounds=7, echo_rounds=5, flower_rounds=4),
    Row(4, 26_010, rounds=150, echo_rounds=100, flower_rounds=100, superlink_rounds=3),
)


@dataclass
class Measured:
    """Times in seconds, sizes in bytes; two lists where something was measured before and after the peer."""

    clients: int
    dimension: int
    byzantine: int
    epsilon: float
    ours: list[list[float]] = field(default_factory=list)
    segments: dict[str, float] = field(default_factory=dict)
    """Medians."""
    echo: dict[str, list[list[float]]] = field(default_factory=lambda: {shape: [] for shape in SHAPES})
    flower: list[float] = field(default_factory=list)
    superlink: list[float] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Of a server, a round."""
    idle_rss: int = 0
    peak_rss: int = 0
    lost: list[str] = field(default_factory=list)


class Peak:
    """The most memory that a process has had, by the system's own account."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self.idle = self.peak = self._kib("VmRSS")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _look(self) -> None:
        with contextlib.suppress(OSError, StopIteration):
            while not self._stopped.wait(0.05):
                self.peak = self._kib("VmHWM")

    def _kib(self, name: str) -> int:
        lines = self._status.read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def measure(row: Row, folder: Path, *, flower: bool = True) -> Measured:
    """Ours, echoes, Flower, echoes, ours."""
    setting = row.setting
    found = Measured(row.clients, row.dimension, setting.byzantine, setting.epsilon or 0.0)
    log = folder / "log"
    with drivers_of(row, setting, log) as drivers:
        federation(row, found, drivers, folder / "before", log)
        echoes(row, found, drivers, log)
    if flower:
        legacy(row, found, log)
    with drivers_of(row, setting, log) as drivers:
        echoes(row, found, drivers, log)
        federation(row, found, drivers, folder / "after", log)
    if flower and row.superlink_rounds:
        from latency_superlink import superlink

        found.superlink = superlink(interpreter(CURRENT), row, folder / "superlink")
    return found


@contextlib.contextmanager
def drivers_of(row: Row, setting: Setting, log: Path) -> Iterator[list[Child]]:
    """One process for each client; gone while a peer is measured, or their memory would be missed."""
    chunk_bytes = setting.experiment().network.chunk_bytes
    with ExitStack() as resources:
        drivers = [resources.enter_context(child("latency_load.py", log)) for _ in range(row.clients)]
        for number, driver in enumerate(drivers):
            shape = {"first": number, "last": number + 1, "d": row.dimension, "chunk_bytes": chunk_bytes}
            driver.tell({**shape, "seed": setting.load.seed})
        for driver in drivers:
            driver.answer()
        yield drivers


def echoes(row: Row, found: Measured, drivers: Sequence[Child], log: Path) -> None:
    """The bare echo in every shape, without its first rounds."""
    rounds = row.echo_rounds + WARM_UP + 1
    chunk_bytes = row.setting.experiment().network.chunk_bytes
    for shape in SHAPES:
        with child("latency_servers.py" if shape == "unary" else "scale_servers.py", log) as server:
            size = {"clients": row.clients, "d": row.dimension, "rounds": rounds, "chunk_bytes": chunk_bytes}
            server.tell({"be": "echo", **size})
            address = server.answer()["address"]
            before = usage(server.pid).cpu_s
            for driver in drivers:
                driver.tell({"do": "echo", "address": address, "rounds": rounds, "shape": shape})
            for driver in drivers:
                found.lost += [f"echo: {problem}" for problem in driver.answer()["lost"]]
            found.cpu_s[f"echo {shape}"] = (usage(server.pid).cpu_s - before) / rounds
            server.tell({"do": "stop"})
            times = server.answer()["complete_at"][WARM_UP:]
        found.echo[shape].append([later - earlier for earlier, later in pairwise(times)])


def federation(row: Row, found: Measured, drivers: Sequence[Child], folder: Path, log: Path) -> None:
    """A run of the parameter server, from its start to its summary."""
    experiment = row.setting.experiment()
    with child("scale_servers.py", log) as server:
        server.tell({"be": "ps", "experiment": experiment.model_dump(mode="json"), "run_dir": str(folder)})
        listening = server.answer()
        peak = Peak(server.pid)
        terms = terms_of(experiment, listening)
        for driver in drivers:
            driver.tell({"do": "federation", **terms})
        for driver in drivers:
            found.lost += driver.answer()["lost"]
        peak.stop()  # what the summary of a run needs is not what its rounds need
        summary = server.answer()
    if summary["status"] != "completed" or summary["refusals"]:
        found.lost.append(f"the run ended as {summary['status']}: {summary['message']} {summary['refusals']}")
    cpu_s = summary["cpu_s"]
    found.cpu_s["ours"] = (cpu_s[-1] - cpu_s[0]) / max(1, len(cpu_s) - 1)
    found.idle_rss, found.peak_rss = max(
        (found.idle_rss, found.peak_rss), (peak.idle, peak.peak), key=lambda pair: pair[1] - pair[0]
    )
    records = RunReader(folder).rounds()
    found.lost += [f"round {one.round_id}: {len(one.missing)} missing" for one in records if one.missing]
    counted = records[WARM_UP:]
    found.ours.append([one.latency_s for one in counted])
    found.segments = {name: statistics.median(one.segments[name] for one in counted) for name in counted[0].segments}


def legacy(row: Row, found: Measured, log: Path) -> None:
    """Flower's legacy server: rounds from one to the next, evaluation off."""
    os.environ[PYTHON] = str(interpreter(LEGACY))
    address = free_address()
    rounds = row.flower_rounds + WARM_UP
    with ExitStack() as resources:
        server = resources.enter_context(child("latency_flower.py", log))
        size = {"clients": row.clients, "byzantine": found.byzantine, "d": row.dimension, "rounds": rounds}
        server.tell({"be": "server", "address": address, **size})
        wait_for(address)
        clients = [resources.enter_context(child("latency_flower.py", log)) for _ in range(row.clients)]
        for number, client in enumerate(clients):
            client.tell({"be": "client", "address": address, "d": row.dimension, "number": number})
        answer = server.answer()
        for client in clients:
            client.answer()
    del os.environ[PYTHON]
    if len(answer["began"]) != rounds + 1:
        found.lost.append(f"Flower began {len(answer['began'])} rounds of {rounds + 1}")
    found.flower = [later - earlier for earlier, later in pairwise(answer["began"][WARM_UP:])]
    found.cpu_s["Flower"] = answer["cpu_s"] / rounds


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def wait_for(address: str, deadline_s: float = CONNECT_S) -> None:
    """Until somebody listens there.

    Raises
    ------
    SystemExit
        Nobody does in time.
    """
    host, _, port = address.rpartition(":")
    give_up = time.monotonic() + deadline_s
    while time.monotonic() < give_up:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
            return
        time.sleep(0.05)
    raise SystemExit(f"nobody listens at {address} after {deadline_s:.0f} s")


def merged(earlier: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Rows measured anew replace those of the same name; the order is that of :data:`ROWS`."""
    rows = {**earlier.get("rows", {}), **new["rows"]}
    names = [row.name for row in ROWS]
    ordered = sorted(rows, key=lambda name: names.index(name) if name in names else len(names))
    return {**new, "rows": {name: rows[name] for name in ordered}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[row.name for row in ROWS], help="this row; repeatable")
    parser.add_argument("--without-flower", action="store_true", help="ours and the echoes; nothing is written")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    rows = [row for row in ROWS if given.only is None or row.name in given.only]
    if not given.without_flower:
        for requirement in (LEGACY, CURRENT):
            interpreter(requirement)
    began, load = time.time(), os.getloadavg()[0]
    facts = {**machine(), "Flower": f"{LEGACY} (legacy server), {CURRENT} (SuperLink)"}
    new: dict[str, Any] = {"rows": {}}
    for row in rows:
        started = time.monotonic()
        print(f"n = {row.clients}, d = {row.dimension:,}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found = measure(row, Path(folder), flower=not given.without_flower)
        new["rows"][row.name] = {
            **asdict(found),
            "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
            "seconds": time.monotonic() - started,
            "load": [load, os.getloadavg()[0]],
            "machine": facts,
        }
        print(page({"rows": {row.name: new["rows"][row.name]}}), flush=True)
        if found.lost:
            raise SystemExit(f"something was lost, nothing is written: {found.lost[:5]}")
    if given.without_flower:
        return
    raw = given.out.with_suffix(".json")
    tree = merged(json.loads(raw.read_text()) if raw.exists() else {}, new)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    raw.write_text(json.dumps(tree, indent=1) + "\n")
    given.out.write_text(page(tree))


if __name__ == "__main__":
    main()
