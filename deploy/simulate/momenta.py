"""``clients/simulated.safetensors``: the momenta of a simulated run, for ``--resume``.

Written before the commit of their round, every ``client.persist_every`` rounds and at a run's end in good order. So a
run that was stopped goes on as if it had not been. One that was killed goes on from momenta of some rounds ago, as
clients of a network do that were killed: any point of the ball is a valid momentum.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from client.memory import Held
from common.durable import write_durably
from common.errors import StoreDamaged
from ps.durable import explaining

__all__ = ["FILE", "load_momenta", "save_momenta"]

FILE = "clients/simulated.safetensors"


def save_momenta(run_dir: Path, run_id: str, held: Held) -> None:
    """Write the latest momenta, (n, d) flattened, and their round.

    Raises
    ------
    StoreUnwritable
        They cannot be written; those written before stand.
    """
    path = run_dir / FILE
    with explaining(path, "store the clients' momenta"):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        data = save({"momenta": held.momentum}, metadata={"run": run_id, "round": json.dumps(held.round_id)})
        write_durably(path, data, mode=0o600)


def load_momenta(run_dir: Path, run_id: str, size: int, last_round: int) -> Held | None:
    """What was written of a run; None if nothing was, or it is of another run.

    Parameters
    ----------
    size
        n times d.
    last_round
        The open round: momenta of a later one cannot be.

    Raises
    ------
    StoreDamaged
        The file is no whole file of momenta.
    """
    path = run_dir / FILE
    if not path.is_file():
        return None
    with explaining(path, "read the clients' momenta"):
        data = path.read_bytes()
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        held = Held(int(header["round"]), load(data)["momenta"])
        whole = (
            held.momentum.dtype == np.float32 and held.momentum.shape == (size,) and 0 <= held.round_id <= last_round
        )
        of_this_run = header["run"] == run_id
    except (ValueError, KeyError, TypeError, SafetensorError) as problem:
        raise StoreDamaged(f"{path}: damaged ({problem}); delete it, and the clients begin at zero again") from None
    if not of_this_run:
        return None
    if not whole:
        raise StoreDamaged(f"{path}: not this run's momenta; delete it, and the clients begin at zero again")
    return held
