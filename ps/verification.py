"""Recomputes everything that a run's ledger claims, from the run folder alone.

Nothing stored is believed: the hash chain is followed row by row, the noise multiplier is calibrated anew, every
round's sensitivity is derived again from the stored configuration, and ε is accounted twice, by our formula and by
dp-accounting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isclose, isfinite
from pathlib import Path
from typing import Any

from common.config import Experiment, digest_of, experiment_from
from common.errors import ByzULDPError, ServerRolledBack, StoreProblem
from common.learning.task import build_task
from ps.mechanism import mechanism_name, mechanism_of
from ps.privacy.claim import claim_of
from ps.privacy.ledger import Budget, Ledger, LedgerEntry
from ps.privacy.pld import epsilon_pld
from ps.reader import RunReader
from ps.release import Mechanism, Shift

__all__ = ["Check", "Verification", "verify_run"]

_SAME = 1e-9
"""Relative: a calibration repeated with another version of the mathematics library may differ by less."""


@dataclass(frozen=True)
class Check:
    """One thing that was recomputed. ``found`` says what was found, or what is wrong."""

    name: str
    holds: bool
    found: str


@dataclass(frozen=True)
class Verification:
    """What a ledger says, recomputed. ε are None without a budget; ``epsilon_pld`` also where it does not apply."""

    run_id: str
    status: str
    rounds: int
    planned: int
    head: str
    remembered_round: int | None
    private: bool
    private_because: str
    premises: tuple[str, ...]
    epsilon: float | None
    delta: float | None
    calibration: str | None
    epsilon_spent: float | None
    epsilon_exact: float | None
    epsilon_renyi: float | None
    epsilon_pld: float | None
    noise_multiplier: float | None
    sensitivity: float | None
    checks: tuple[Check, ...]

    @property
    def holds(self) -> bool:
        """Whether every check does."""
        return all(check.holds for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """JSON values; what is infinite is null."""
        values = asdict(self)
        return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in values.items()} | {
            "holds": self.holds
        }


def verify_run(folder: Path, *, remembered: str | None = None) -> Verification:
    """Recompute what a run's ledger claims.

    Parameters
    ----------
    folder
        The run folder; only read.
    remembered
        Head of the ledger that somebody outside has seen, in hexadecimal.

    Raises
    ------
    StoreDamaged
        The folder holds no run, or its chain is broken: there is nothing to recompute from.
    ServerRolledBack
        ``remembered`` is no head of this ledger: rounds that were published are missing from it.
    """
    reader = RunReader(folder)
    reader.verify()
    rows = reader.ledger_rows()
    ledger = Ledger.restored((text, head) for _, text, head in rows)
    remembered_round = None if remembered is None else _round_of(remembered, rows)
    genesis, status = ledger.genesis, reader.status()
    budget = Budget.of(genesis)
    configuration = dict(reader.run.configuration)
    checks = [
        Check("chain", True, f"{len(rows)} rows, each chained to the one before"),
        _configuration(configuration, ledger),
        _model(reader, ledger),
    ]
    try:
        experiment = experiment_from(configuration, where=f"{folder}: the stored configuration")
        mechanism = mechanism_of(experiment, budget, lambda: build_task(experiment).dataset.train.labels)
    except ByzULDPError as problem:
        checks.append(Check("mechanism", False, f"cannot be built again: {problem}"))
        private = (False, "not private: the mechanism cannot be built again")
    else:
        checks += [
            _mechanism(experiment, mechanism, ledger),
            _sensitivities(mechanism, experiment, ledger, reader.run.parameters),
        ]
        private = claim_of(experiment, genesis.premises)
    pld = None
    if budget is not None:
        checks.append(_budget(budget, ledger))
        pld = epsilon_pld(ledger, budget.delta)
        if pld is not None:
            checks.append(_accountants(ledger, budget, pld))
    if not all(check.holds for check in checks):
        private = (False, "not private: " + "; ".join(check.found for check in checks if not check.holds))
    return Verification(
        run_id=genesis.run_id,
        status=status.status,
        rounds=ledger.next_round,
        planned=genesis.rounds,
        head=ledger.head.hex(),
        remembered_round=remembered_round,
        private=private[0],
        private_because=private[1],
        premises=genesis.premises,
        epsilon=budget.epsilon if budget else None,
        delta=budget.delta if budget else None,
        calibration=budget.calibration if budget else None,
        epsilon_spent=ledger.epsilon_spent(budget.delta, budget.calibration) if budget else None,
        epsilon_exact=ledger.epsilon_spent(budget.delta, "exact") if budget else None,
        epsilon_renyi=ledger.epsilon_spent(budget.delta, "renyi") if budget else None,
        epsilon_pld=pld,
        noise_multiplier=genesis.noise_multiplier,
        sensitivity=genesis.sensitivity,
        checks=tuple(checks),
    )


def _round_of(remembered: str, rows: Sequence[tuple[int, str, bytes]]) -> int:
    for round_id, _, head in rows:
        if head.hex() == remembered.strip().lower():
            return round_id
    raise ServerRolledBack(
        f"--head {remembered}: none of the {len(rows)} rows of this ledger has that head: either it belongs to another "
        "run, or this folder was restored from a copy and rounds that were published are missing from it"
    )


def _configuration(configuration: dict[str, Any], ledger: Ledger) -> Check:
    same = digest_of(configuration) == ledger.genesis.configuration
    return Check(
        "configuration",
        same,
        "the stored one is what row 0 was opened with" if same else "the stored one is not what row 0 was opened with",
    )


def _model(reader: RunReader, ledger: Ledger) -> Check:
    try:
        round_id, theta, _ = reader.last_model()
    except StoreProblem as problem:
        return Check("model", False, str(problem))
    found = (
        f"{ledger.next_round} releases; the last model, of round {round_id}, is as it was committed (d = {theta.size})"
    )
    return Check("model", round_id == ledger.next_round, found)


def _mechanism(experiment: Experiment, mechanism: Mechanism, ledger: Ledger) -> Check:
    genesis = ledger.genesis
    recomputed = {
        "num_clients": (genesis.num_clients, mechanism.num_clients),
        "num_byzantine": (genesis.num_byzantine, mechanism.num_byzantine),
        "rule": (genesis.rule, mechanism.rule.name),
        "mechanism": (genesis.mechanism, mechanism_name(experiment)),
        "fingerprint": (genesis.fingerprint, experiment.fingerprint()),
    }
    wrong = [f"{name} = {stored!r}, not {found!r}" for name, (stored, found) in recomputed.items() if stored != found]
    z = genesis.noise_multiplier
    if z is not None and not isclose(z, mechanism.noise_multiplier, rel_tol=_SAME):
        wrong.append(f"noise_multiplier = {z!r}, not {mechanism.noise_multiplier!r}")
    said = f"{genesis.rule}, n = {genesis.num_clients}, f = {genesis.num_byzantine}, z = {z!r}"
    return Check("mechanism", not wrong, "; ".join(wrong) or said)


def _sensitivities(mechanism: Mechanism, experiment: Experiment, ledger: Ledger, num_parameters: int) -> Check:
    """Every round's S is derived again; where it rests on released models that are gone, it may only be larger."""
    if not mechanism.private:
        return Check("sensitivity", True, "no noise, so none is claimed")
    beta = experiment.training.schedule_of("server_momentum")
    for entry in ledger.entries:
        expected = _sensitivity(mechanism, num_parameters, entry, beta(entry.round_id))
        enough = entry.sensitivity >= expected * (1 - _SAME)
        exact = mechanism.inside or isclose(entry.sensitivity, expected, rel_tol=_SAME)
        if not enough or not exact:
            wrong = f"round {entry.round_id} states S = {entry.sensitivity!r}, recomputed {expected!r}"
            return Check("sensitivity", False, wrong)
    said = "S of every round is what the rule, n, f and C give"
    if mechanism.inside:
        said = (
            "S of every round is at least what the rule, n, f, C and β give (the allowance for rounding is not stored)"
        )
    return Check("sensitivity", True, said)


def _sensitivity(mechanism: Mechanism, num_parameters: int, entry: LedgerEntry, beta: float) -> float:
    counted = mechanism.counted(entry.answers)
    if mechanism.inside:
        return mechanism.sensitivity_for(beta, counted)
    shift: Shift | None = None
    return mechanism.charged_sensitivity(num_parameters, shift, counted)


def _budget(budget: Budget, ledger: Ledger) -> Check:
    fits = ledger.spent is not None and ledger.spent <= budget.limit
    spent = ledger.epsilon_spent(budget.delta, budget.calibration)
    relation = "within" if fits else "beyond"
    found = f"spent ε = {spent:.6g}, {relation} the budget of ε = {budget.epsilon:g} at δ = {budget.delta:g}"
    return Check("budget", fits, found)


def _accountants(ledger: Ledger, budget: Budget, pld: float) -> Check:
    """Two accountants must agree; the library's is an upper bound on a grid of losses."""
    exact = ledger.epsilon_spent(budget.delta, "exact")
    agree = isclose(pld, exact, rel_tol=1e-3, abs_tol=1e-3)
    return Check("accountants", agree, f"closed formula {exact:.6f}, dp-accounting's PLD {pld:.6f}")
