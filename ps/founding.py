"""Row 0 of a ledger: what a run promises before its first round, as a function of its configuration.

The server writes it; a resumed server and ``byzuldp privacy verify`` derive it again and compare every field, so that
neither believes what is stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from math import isclose
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config import Experiment, digest_of
from ps.mechanism import budget_of, fixed_sensitivity, mechanism_name, mechanism_of
from ps.privacy.claim import neighbouring, premises_for
from ps.privacy.ledger import Genesis
from ps.privacy.premises import KNOWN
from ps.privacy.previous import Previous, carried_by
from ps.release import Mechanism

__all__ = ["genesis_of", "promised_by"]

_SAME = 1e-9
"""Relative: a calibration repeated with another version of the mathematics library may differ by less."""

_ITS_OWN = ("run_id", "at", "nonce")


def genesis_of(
    experiment: Experiment, mechanism: Mechanism, previous: Previous, num_parameters: int, *, run_id: str
) -> Genesis:
    """What a run of the experiment promises."""
    privacy = experiment.privacy
    return Genesis(
        fingerprint=experiment.fingerprint(),
        configuration=digest_of(experiment.model_dump(mode="json")),
        run_id=run_id,
        epsilon=privacy.epsilon,
        delta=None if privacy.epsilon is None else privacy.delta,
        rounds=experiment.training.rounds,
        calibration=privacy.calibration,
        noise_multiplier=mechanism.noise_multiplier,
        sensitivity=fixed_sensitivity(mechanism, num_parameters),
        num_clients=mechanism.num_clients,
        num_byzantine=mechanism.num_byzantine,
        rule=mechanism.rule.name,
        premises=premises_for(experiment, previous.premises),
        at=time.time(),
        mechanism=mechanism_name(experiment),
        previous=previous.runs,
        carried=previous.carried,
        neighbouring=neighbouring(experiment, previous.neighbouring),
    )


def promised_by(
    genesis: Genesis, experiment: Experiment, num_parameters: int, labels: Callable[[], NDArray[np.int64]]
) -> tuple[Mechanism, list[str]]:
    """The mechanism that the configuration asks for, and in what row 0 says something else.

    Of earlier runs only what row 0 lists is known here: their costs have to add up to what it carries, and their
    premises can only have been added.

    Raises
    ------
    RuleError, PrivacyError
        The mechanism cannot be built, or the earlier runs leave nothing to spend.
    """
    wrong = []
    if bool(experiment.privacy.previous) != bool(genesis.previous):
        wrong.append(f"previous = {genesis.previous!r}, but the configuration names {experiment.privacy.previous!r}")
    earlier = Previous(
        runs=genesis.previous,
        carried=carried_by(genesis.previous),
        premises=tuple(premise for premise in genesis.premises if genesis.previous and premise in KNOWN),
        neighbouring=(genesis.neighbouring,) if genesis.previous else (),
    )
    mechanism = mechanism_of(experiment, budget_of(experiment, earlier), labels)
    expected = genesis_of(experiment, mechanism, earlier, num_parameters, run_id=genesis.run_id)
    derived, stated = asdict(expected), asdict(genesis)
    wrong += [
        f"{name} = {stated[name]!r}, not {derived[name]!r}"
        for name in stated
        if name not in _ITS_OWN and not _same(stated[name], derived[name])
    ]
    return mechanism, wrong


def _same(stated: Any, derived: Any) -> bool:
    if isinstance(stated, float) and isinstance(derived, float):
        return isclose(stated, derived, rel_tol=_SAME)
    return bool(stated == derived)
