"""How a run begins, and how one is taken up again, by whoever makes its rounds: a server, or a simulation."""

from __future__ import annotations

import secrets
from pathlib import Path

from common.config import SCHEDULE, Experiment, Network, digest_of, experiment_from
from common.errors import StoreDamaged
from common.learning.task import Task
from ps.faults import Fault, no_fault
from ps.founding import genesis_of, promised_by
from ps.privacy.ledger import Genesis, Ledger
from ps.privacy.previous import Previous
from ps.release import Mechanism
from ps.store import RunStore

__all__ = ["as_promised", "begin_run", "stored_run", "with_schedule_of"]


def begin_run(
    experiment: Experiment,
    run_dir: Path,
    task: Task,
    mechanism: Mechanism,
    previous: Previous,
    fault: Fault = no_fault,
) -> tuple[RunStore, Ledger]:
    """Commit θ_0 with the ledger's first row: what this run may spend, fixed before round 0.

    Raises
    ------
    RunFolderExists, RunFolderInUse, StoreUnwritable
        See :meth:`ps.store.RunStore.create`.
    """
    run_id = secrets.token_hex(8)
    genesis = genesis_of(experiment, mechanism, previous, task.num_parameters, run_id=run_id)
    store, _ = RunStore.create(
        run_dir,
        run_id=run_id,
        configuration=experiment.model_dump(mode="json"),
        fingerprint=experiment.fingerprint(),
        genesis_json=genesis.to_json(),
        theta=task.model.parameters_flat().cpu().numpy().copy(),
        fault=fault,
    )
    return store, Ledger.opened(genesis)


def stored_run(store: RunStore) -> tuple[Ledger, Experiment]:
    """The ledger and the configuration of a run that goes on.

    They are compared before anything acts on the configuration, a user's own modules that it names included.

    Raises
    ------
    StoreDamaged
        The ledger does not hold together, or the database says another run or configuration than its row 0.
    """
    ledger = Ledger.restored((text, head) for _, text, head in store.ledger_rows())
    _refuse_other_configuration(store, ledger.genesis)
    return ledger, experiment_from(dict(store.configuration), where=f"{store.folder}: the stored configuration")


def with_schedule_of(stored: Experiment, network: Network) -> Network:
    """What may change on a resume, with what may not: the public schedule, which the claim rests on."""
    return network.model_copy(update={key: getattr(stored.network, key) for key in SCHEDULE})


def as_promised(genesis: Genesis, experiment: Experiment, task: Task) -> Mechanism:
    """The mechanism of a run that goes on; what row 0 of the ledger says is what would be released now.

    Raises
    ------
    StoreDamaged
        Row 0 was not opened by this configuration, or this version would release something else.
    """
    mechanism, wrong = promised_by(genesis, experiment, task.num_parameters, lambda: task.dataset.train.labels)
    if wrong:
        raise StoreDamaged(
            f"row 0 of the ledger is not what this version makes of the run's configuration: {'; '.join(wrong)}; "
            "resume with the version that started the run, or restore the folder as it was"
        )
    return mechanism


def _refuse_other_configuration(store: RunStore, genesis: Genesis) -> None:
    same = digest_of(store.configuration) == genesis.configuration and store.run_id == genesis.run_id
    if not same:
        raise StoreDamaged(
            f"{store.folder}: the stored run and configuration are not those that row 0 of the ledger was opened "
            "with; restore the folder as it was, or start another run in another --run-dir"
        )
