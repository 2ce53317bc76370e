"""A server that does nothing but commit; test_store_kill.py starts it and kills it.

``store_child.py loop FOLDER``: for every line on stdin forks a server, which says ``pid N``, begins or takes up the
run, and commits without end; it prints ``round digest head`` for the latest round at start and for every round after
its commit: what a server would publish. When it has been killed, ``gone``. Every model is drawn anew from the system's
entropy, as noise is, so that a round noised twice shows.

``store_child.py points FOLDER``: for each fault point, once while beginning a run and once while committing, a forked
child kills itself there; FOLDER/<create|commit>-<point> is what it leaves, and the round committed before is printed.
"""

import os
import signal
import sys
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

import numpy as np

from common.errors import RunFolderExists
from ps.faults import IN_STORE, Fault
from ps.store import CommittedRound, PreparedRound, RunStore

D = 26_010


def fresh() -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=int.from_bytes(os.urandom(16), "little"))).standard_normal(
        D, dtype=np.float32
    )


def publish(model: CommittedRound, label: str = "") -> None:
    digest = sha256(model.theta.tobytes() + model.server_momentum.tobytes()).hexdigest()
    os.write(1, f"{label}{model.round_id} {digest} {model.head.hex()}\n".encode())


def prepare(round_id: int) -> PreparedRound:
    return PreparedRound(round_id, fresh(), fresh(), f'{{"round":{round_id},"nonce":"{os.urandom(8).hex()}"}}', 5)


def begin(folder: Path, fault: Fault = lambda _point: None) -> tuple[RunStore, CommittedRound]:
    return RunStore.create(
        folder,
        run_id="killed",
        configuration={"clients": 5},
        fingerprint="0",
        genesis_json=f'{{"nonce":"{os.urandom(8).hex()}"}}',
        theta=fresh(),
        fault=fault,
    )


def loop(folder: Path) -> None:
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            os.write(1, f"pid {os.getpid()}\n".encode())
            serve(folder)
        os.waitpid(child, 0)
        os.write(1, b"gone\n")


def serve(folder: Path) -> NoReturn:
    try:
        store, latest = begin(folder)
    except RunFolderExists:
        store = RunStore.open(folder)
        latest = store.latest()
    publish(latest)
    while True:
        latest = store.commit(prepare(latest.round_id + 1))
        publish(latest)


def points(parent: Path) -> None:
    for step in ("create", "commit"):
        for point in IN_STORE:
            child = os.fork()
            if child == 0:
                die_at(parent / f"{step}-{point}", point, creating=step == "create")
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), f"{step}-{point}: the child outlived its fault point"


def die_at(folder: Path, point: str, *, creating: bool) -> NoReturn:
    armed = creating

    def kill(here: str) -> None:
        if armed and here == point:
            os.kill(os.getpid(), signal.SIGKILL)

    store, latest = begin(folder, kill)
    for round_id in (1, 2, 3, 4):
        latest = store.commit(prepare(round_id))
    publish(latest, f"{folder.name} ")
    armed = True
    store.commit(prepare(5))
    os._exit(1)


if __name__ == "__main__":
    {"loop": loop, "points": points}[sys.argv[1]](Path(sys.argv[2]))
