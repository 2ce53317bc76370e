"""The current Flower: a SuperLink and SuperNodes, with an app that returns a constant and takes a trimmed mean.

Everything of it goes to a folder of its own, its home included, and is gone afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from latency import Row

__all__ = ["superlink"]

START_S = 120.0
ROUND_S = 60.0
"""Of one; it takes seconds."""

PROJECT = """\
[project]
name = "constant"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "benchmark"

[tool.flwr.app.components]
serverapp = "constant:server"
clientapp = "constant:client"
"""

APP = """\
import json, time
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedTrimmedAvg

D, CLIENTS, ROUNDS, BETA, FILE = {d}, {clients}, {rounds}, {beta}, {file!r}
client = ClientApp()
server = ServerApp()
began = []


class Timed(FedTrimmedAvg):
    def configure_train(self, *arguments, **named):
        began.append(time.perf_counter())
        return super().configure_train(*arguments, **named)


@client.train()
def train(message, context):
    arrays = ArrayRecord([np.zeros(D, dtype=np.float32)])
    content = RecordDict({{"arrays": arrays, "metrics": MetricRecord({{"num-examples": 1}})}})
    return Message(content=content, reply_to=message)


@server.main()
def main(grid, context):
    strategy = Timed(
        beta=BETA, fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS
    )
    arrays = ArrayRecord([np.zeros(D, dtype=np.float32)])
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=ROUNDS)
    with open(FILE, "w") as file:
        json.dump(began, file)
"""


def superlink(python: Path, row: Row, folder: Path) -> list[float]:
    """Seconds of each round from its beginning to the next one's; the first is left out.

    Raises
    ------
    SystemExit
        It does not come to its end in time.
    """
    from latency import free_address, wait_for

    folder.mkdir()
    app, found = folder / "app", folder / "began.json"
    app.mkdir()
    (app / "pyproject.toml").write_text(PROJECT)
    code = APP.format(
        d=row.dimension,
        clients=row.clients,
        rounds=row.superlink_rounds + 2,
        beta=(row.clients // 5) / row.clients,
        file=str(found),
    )
    (app / "constant.py").write_text(code)
    home = folder / "home"
    home.mkdir()
    address = free_address()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{address}"\ninsecure = true\n'
    )
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{python.parent}:{os.environ.get('PATH', '')}",
    }
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as resources:

        def start(name: str, *command: str) -> None:
            resources.enter_context(_running(python.parent / command[0], command[1:], environment, folder / name))

        start(
            "superlink",
            *("flower-superlink", "--insecure", "--host", host, "--port", port),
            "--disable-runtime-dependency-installation",
        )
        wait_for(address, START_S)
        for number in range(row.clients):
            own = free_address().rpartition(":")[2]
            start(f"node-{number}", "flower-supernode", "--insecure", "--superlink", address, "--port", own)
        with (folder / "run").open("wb") as log:
            command = [str(python.parent / "flwr"), "run", str(app), "here"]
            done = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False, timeout=START_S)
        give_up = time.monotonic() + START_S + ROUND_S * (row.superlink_rounds + 2)
        while not (found.exists() and found.read_text().endswith("]")):
            if done.returncode or time.monotonic() > give_up:
                said = "".join(
                    log.read_text(errors="replace")[-1500:] for log in (folder / "run", folder / "superlink")
                )
                raise SystemExit(f"Flower's SuperLink did not finish its rounds:\n{said}")
            time.sleep(0.2)
    return [later - earlier for earlier, later in pairwise(json.loads(found.read_text())[1:])]


@contextlib.contextmanager
def _running(program: Path, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[None]:
    """A process with a group of its own, since it starts others; none of them is left."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(program), *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
