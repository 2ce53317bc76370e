"""Recomputes everything that a run's ledger claims, from the run folder alone.

Nothing stored is believed: the hash chain is followed row by row, the noise multiplier is calibrated anew, every
round's sensitivity is derived again from the stored configuration, and ε is accounted twice, by our formula and by
dp-accounting.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import isclose, isfinite
from pathlib import Path
from typing import Any

from common.config import Experiment, digest_of, experiment_from
from common.errors import ByzULDPError, ConfigError, ServerRolledBack, StoreProblem
from common.learning.task import build_task
from common.privacy.conversions import epsilon_of
from common.privacy.costs import mu_from
from ps.founding import promised_by
from ps.privacy.claim import claim_of
from ps.privacy.ledger import Budget, Genesis, Ledger, LedgerEntry, from_json
from ps.privacy.pld import epsilon_pld
from ps.privacy.previous import previous_runs
from ps.reader import RunReader
from ps.release import Mechanism, Shift

__all__ = ["Check", "Verification", "verify_run"]

_TRIES = 5

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
    epsilon_previous: float | None
    previous: tuple[str, ...]
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
    for _ in range(_TRIES):  # beside a running server: a round may be committed between two looks
        rows = reader.ledger_rows()
        model = _model(reader, len(rows) - 1)
        if model.holds:
            break
    ledger = Ledger.restored((text, head) for _, text, head in rows)
    remembered_round = None if remembered is None else _round_of(remembered, rows)
    genesis, status = ledger.genesis, reader.status()
    budget = Budget.of(genesis)
    configuration = dict(reader.run.configuration)
    checks = [
        Check("chain", True, f"{len(rows)} rows, each chained to the one before"),
        _configuration(configuration, ledger),
        model,
    ]
    try:
        experiment = experiment_from(configuration, where=f"{folder}: the stored configuration")
        mechanism, wrong = promised_by(
            genesis, experiment, reader.run.parameters, lambda: build_task(experiment).dataset.train.labels
        )
    except ByzULDPError as problem:
        checks.append(Check("promise", False, f"cannot be derived again: {problem}"))
        private = (False, "not private: the mechanism cannot be built again")
    else:
        checks += [
            _promise(ledger, wrong),
            *_earlier(experiment, ledger),
            _sensitivities(mechanism, experiment, ledger, reader.run.parameters),
        ]
        private = claim_of(experiment, genesis.premises, late=reader.late_models())
    pld = None
    discrete = genesis.mechanism == "discrete"
    if budget is not None:
        pld = epsilon_pld(ledger, budget.delta)
        checks += [_budget(budget, ledger), _accountants(ledger, budget, pld)]
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
        epsilon_exact=ledger.epsilon_spent(budget.delta, "exact") if budget and not discrete else None,
        epsilon_renyi=ledger.epsilon_spent(budget.delta, "renyi") if budget else None,
        epsilon_pld=pld,
        epsilon_previous=_carried(ledger, budget) if budget else None,
        previous=tuple(text.partition(" ")[0] for text in genesis.previous),
        noise_multiplier=genesis.noise_multiplier,
        sensitivity=genesis.sensitivity,
        checks=tuple(checks),
    )


def _round_of(remembered: str, rows: Sequence[tuple[int, str, bytes]]) -> int:
    wanted = remembered.strip().lower()
    if not re.fullmatch("[0-9a-f]{16,64}", wanted):
        raise ConfigError(f"--head {remembered}: expected 64 hexadecimal digits, or the first 16 or more of them")
    for round_id, _, head in rows:
        if head.hex().startswith(wanted):
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


def _planned(reader: RunReader) -> int:
    genesis = from_json(reader.ledger_rows()[0][1])
    return genesis.rounds if isinstance(genesis, Genesis) else -1


def _model(reader: RunReader, last: int) -> Check:
    try:
        round_id, theta, _ = reader.last_model()
    except StoreProblem as problem:
        return Check("model", False, str(problem))
    if reader.status().status == "completed" and last != _planned(reader):
        return Check("model", False, f"the run says it is completed, after {last} releases: rows are missing")
    found = f"{last} releases; the last model, of round {round_id}, is as it was committed (d = {theta.size})"
    return Check("model", round_id == last, found)


def _promise(ledger: Ledger, wrong: Sequence[str]) -> Check:
    genesis = ledger.genesis
    said = f"{genesis.rule}, n = {genesis.num_clients}, f = {genesis.num_byzantine}, z = {genesis.noise_multiplier!r}"
    return Check("promise", not wrong, "; ".join(wrong) or f"row 0 is what the configuration asks for: {said}")


def _earlier(experiment: Experiment, ledger: Ledger) -> list[Check]:
    """Earlier runs on the same budget, read again where their folders are still there."""
    if not experiment.privacy.previous:
        return []
    there = [folder for folder in experiment.privacy.previous if folder.is_dir()]
    if len(there) < len(experiment.privacy.previous):
        return [Check("earlier runs", True, "not all folders are here: what row 0 carries is taken from it")]
    try:
        carried = previous_runs(there).carried
    except ByzULDPError as problem:
        return [Check("earlier runs", False, str(problem))]
    enough = carried <= ledger.genesis.carried * (1 + _SAME)
    found = f"they cost {carried:.6g}, row 0 carries {ledger.genesis.carried:.6g}"
    return [Check("earlier runs", enough, found)]


def _sensitivities(mechanism: Mechanism, experiment: Experiment, ledger: Ledger, num_parameters: int) -> Check:
    """Every round's S is derived again; where it rests on released models that are gone, it may only be larger."""
    if not mechanism.private:
        return Check("sensitivity", True, "no noise, so none is claimed")
    beta = experiment.training.schedule_of("server_momentum")
    for entry in ledger.entries:
        expected = _sensitivity(mechanism, num_parameters, entry, beta(entry.round_id))
        enough = entry.sensitivity >= expected * (1 - _SAME)
        noise = entry.noise_multiplier * entry.sensitivity
        if not isclose(entry.sigma, noise, rel_tol=_SAME):
            return Check("sensitivity", False, f"round {entry.round_id} states σ = {entry.sigma!r}, z S = {noise!r}")
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


def _carried(ledger: Ledger, budget: Budget) -> float | None:
    """ε of the earlier runs alone."""
    carried = ledger.genesis.carried
    return epsilon_of(mu_from(Fraction(carried)), budget.delta, budget.calibration) if carried else None


def _accountants(ledger: Ledger, budget: Budget, pld: float | None) -> Check:
    """Two accountants must agree; the library's is an upper bound on a grid of losses."""
    if pld is None:
        why = "no release, discrete noise, or an ε or δ beyond what dp-accounting can do"
        return Check("accountants", True, f"not compared: {why}")
    exact = ledger.epsilon_spent(budget.delta, "exact")
    agree = isclose(pld, exact, rel_tol=2e-3, abs_tol=1e-4)
    return Check("accountants", agree, f"closed formula {exact:.6f}, dp-accounting's PLD {pld:.6f}")
