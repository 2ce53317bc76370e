"""What was released, in order, and whether one more release fits the budget.

The ledger stores events, never ε: ε is recomputed from them. Each row's head is the SHA-256 of the head before it and
the row, so one head names a whole history, and a client that remembers a head notices a server that went back.

The budget is a filter fixed before round 0: (ε, δ) becomes B = μ*², and a round runs only if Σ 1/z_s² + 1/z_t² ≤ B,
in exact rationals. So the guarantee is the *budget's* (ε, δ), whenever the run stops (Rogers et al. 2016: a filter).
The ε of what was spent so far is an odometer: true at a round chosen in advance, no guarantee at one chosen by looking
at the releases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from hashlib import sha256

from common.errors import PrivacyError, StoreDamaged
from common.privacy.calibration import ROUNDED_UP, calibrate
from common.privacy.conversions import Calibration, epsilon_of
from common.privacy.costs import cost_of, limit_of, mu_from
from ps.privacy.rows import Genesis, LedgerEntry, from_json

__all__ = ["Budget", "Genesis", "Ledger", "LedgerEntry", "cost_of", "from_json"]

ORIGIN = bytes(32)
"""What the first row is chained to."""


_A_TRIFLE = Fraction(1, 10**6)
"""Of a budget: what rounding may have left of one that is spent, and no run can use."""


@dataclass(frozen=True)
class Ledger:
    """The genesis row and every release since, each checked. Immutable: :meth:`append` gives the next ledger.

    So a server first builds the next ledger, then commits its last row and head, and only then forgets this one.
    Use :meth:`opened` and :meth:`restored`, not the constructor.
    """

    genesis: Genesis
    entries: tuple[LedgerEntry, ...]
    head: bytes
    spent: Fraction | None
    """Σ 1/z² in exact rationals, earlier runs on the same budget included; None once a release had no noise (∞)."""

    @classmethod
    def opened(cls, genesis: Genesis) -> Ledger:
        """The ledger of a run before round 0."""
        return cls(genesis, (), _chained(ORIGIN, genesis), Fraction(genesis.carried))

    @classmethod
    def restored(cls, rows: Iterable[tuple[str, bytes]], *, head: bytes | None = None) -> Ledger:
        """Rebuild a ledger from stored rows, each with the head after it, checking all of it.

        Parameters
        ----------
        rows
            (canonical JSON, head) in order, the genesis first.
        head
            The head that someone outside remembers for the last row, if any.

        Raises
        ------
        StoreDamaged
            A row is missing, repeated, changed, or does not belong to this run.
        """
        genesis: Genesis | None = None
        entries: list[LedgerEntry] = []
        reached = ORIGIN
        total: Fraction | None = None
        for number, (text, stored) in enumerate(rows):
            row = from_json(text)
            if isinstance(row, Genesis) != (number == 0):
                raise StoreDamaged(f"ledger row {number} is a {row.kind} row: expected one genesis row, the first")
            if isinstance(row, Genesis):
                genesis, total = row, Fraction(row.carried)
            elif genesis is not None:
                try:
                    _check_follows(genesis, len(entries), row)
                except PrivacyError as problem:
                    raise StoreDamaged(f"ledger row {number} does not belong: {problem}") from None
                entries.append(row)
                total = _plus(total, row)
            reached = _chained(reached, row)
            if reached != stored:
                raise StoreDamaged(f"ledger row {number} was changed: its head is {reached.hex()}, not {stored.hex()}")
        if genesis is None:
            raise StoreDamaged("the ledger is empty: expected at least its genesis row")
        if head is not None and reached != head:
            raise StoreDamaged(f"the ledger ends at head {reached.hex()}: expected {head.hex()}")
        return cls(genesis, tuple(entries), reached, total)

    @property
    def next_round(self) -> int:
        """The round whose release comes next."""
        return len(self.entries)

    @property
    def last(self) -> Genesis | LedgerEntry:
        """The row that :attr:`head` ends with."""
        return self.entries[-1] if self.entries else self.genesis

    def append(self, entry: LedgerEntry) -> Ledger:
        """The ledger with one more release; this one stays as it is.

        Raises
        ------
        PrivacyError
            The round is not the next one, or a value that genesis fixed is another.
        """
        _check_follows(self.genesis, self.next_round, entry)
        return Ledger(self.genesis, (*self.entries, entry), _chained(self.head, entry), _plus(self.spent, entry))

    def rows(self) -> list[tuple[str, bytes]]:
        """(canonical JSON, head after it) of every row, the genesis first: what :meth:`restored` reads."""
        head, rows = ORIGIN, []
        everything: tuple[Genesis | LedgerEntry, ...] = (self.genesis, *self.entries)
        for row in everything:
            head = _chained(head, row)
            rows.append((row.to_json(), head))
        return rows

    @property
    def mu(self) -> float:
        """μ of all releases together, earlier runs' included; ∞ if one had no noise."""
        return mu_from(self.spent)

    def epsilon_spent(self, delta: float, conversion: Calibration = "exact") -> float:
        """The odometer: ε at ``delta`` of the releases so far, recomputed from them. Not the guarantee: see Budget.

        Releases of earlier runs on the same budget count.
        """
        return epsilon_of(self.mu, delta, conversion)


@dataclass(frozen=True)
class Budget:
    """(ε, δ) for a whole run and those before it, fixed before round 0.

    Parameters
    ----------
    epsilon, delta
        What all the releases together are guaranteed to be.
    rounds
        T, of this run.
    calibration
        The conversion the guarantee is stated by.
    carried
        Σ 1/z² of earlier runs on the same identities: it is spent already.

    Raises
    ------
    PrivacyError
        ε, δ, ``rounds`` or ``calibration`` is out of range: see :func:`common.privacy.calibration.calibrate`; or the
        earlier runs leave nothing.
    """

    epsilon: float
    delta: float
    rounds: int
    calibration: Calibration = "exact"
    carried: float = 0.0

    def __post_init__(self) -> None:
        _ = self.noise_multiplier

    @classmethod
    def of(cls, genesis: Genesis) -> Budget | None:
        """The budget a run was opened with; None if it promised no privacy."""
        if genesis.epsilon is None or genesis.delta is None:
            return None
        return cls(
            genesis.epsilon,
            genesis.delta,
            genesis.rounds,
            genesis.calibration,  # type: ignore[arg-type]
            genesis.carried,
        )

    @cached_property
    def noise_multiplier(self) -> float:
        """z with which exactly the planned rounds fit."""
        z = calibrate(self.epsilon, self.delta, self.rounds, self.calibration)
        if self.carried == 0.0:
            return z
        left = self.limit - Fraction(self.carried)
        spent = epsilon_of(math.sqrt(self.carried), self.delta, self.calibration)
        _require(
            left > self.limit * _A_TRIFLE,
            f"privacy.previous has spent epsilon = {spent:.4g} at delta = {self.delta:g} of epsilon = {self.epsilon:g}"
            ": nothing is left for another run; ask for a larger privacy.epsilon for all of them together",
        )
        z = math.sqrt(self.rounds) / mu_from(left) * (1 + ROUNDED_UP)
        _require(
            0 < z < math.inf, f"what privacy.previous leaves needs a noise multiplier of {z!r}: too little is left"
        )
        return z

    @cached_property
    def limit(self) -> Fraction:
        """B = μ*²: the most that Σ 1/z² may reach."""
        return limit_of(self.epsilon, self.delta, self.calibration)

    def admits(self, ledger: Ledger, noise_multiplier: float) -> bool:
        """Whether one more release with this multiplier stays within the budget, in exact rationals."""
        _require(
            0 <= noise_multiplier < math.inf,
            f"noise multiplier = {noise_multiplier!r}: expected a finite number, at least 0",
        )
        cost = cost_of(noise_multiplier)
        return cost is not None and ledger.spent is not None and ledger.spent + cost <= self.limit


def _check_follows(genesis: Genesis, next_round: int, entry: LedgerEntry) -> None:
    _require(
        entry.round_id == next_round,
        f"a release of round {entry.round_id} cannot follow {next_round} releases: expected round {next_round}; "
        "no round is skipped or noised twice",
    )
    for name in ("num_clients", "num_byzantine", "rule", "premises", "sensitivity", "noise_multiplier", "mechanism"):
        fixed, given = getattr(genesis, name), getattr(entry, name)
        _require(
            fixed is None or fixed == given,
            f"{name} = {given!r} in round {entry.round_id}: fixed before round 0 as {fixed!r}",
        )


def _plus(spent: Fraction | None, entry: LedgerEntry) -> Fraction | None:
    cost = cost_of(entry.noise_multiplier)
    return None if cost is None or spent is None else spent + cost


def _chained(head: bytes, row: Genesis | LedgerEntry) -> bytes:
    return sha256(head + row.to_json().encode()).digest()


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PrivacyError(otherwise)
