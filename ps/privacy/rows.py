"""What a ledger row says, and its one canonical form.

Rows are hashed, so one value has one spelling: JSON with sorted keys, no spaces, floats in their shortest exact form.
Every row has a random nonce, so that a head, which is published, tells nothing of the row it ends with.
"""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from numbers import Integral
from typing import Any, ClassVar

from common.errors import PrivacyError, StoreDamaged

__all__ = ["Genesis", "LedgerEntry", "from_json"]

_MECHANISMS = ("gaussian", "discrete", "none")
_SLACK = 1e-12  # σ = z S may be rounded to the nearest; the budget is shaved by more


def _nonce() -> str:
    return secrets.token_hex(32)


class _Row:
    kind: ClassVar[str]
    nonce: str
    """256 random bits: heads are published, and must not be inverted by trying the few values a row can have."""

    def to_json(self) -> str:
        """The row's canonical form; :func:`from_json` reads it back, exactly."""
        values = {"kind": self.kind} | asdict(self)  # type: ignore[call-overload]
        return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)

    def _normalise(self) -> None:
        """One value, one form: 1 and 1.0 would hash differently."""
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            kind = str(item.type)
            if value is None and "None" in kind:
                continue
            if kind.startswith("tuple"):
                good = isinstance(value, tuple | list) and all(isinstance(part, str) for part in value)
                object.__setattr__(self, item.name, tuple(value) if good else value)
            elif kind.startswith("float"):
                good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
                object.__setattr__(self, item.name, float(value) if good else value)
            elif kind.startswith("int"):
                good = isinstance(value, Integral) and not isinstance(value, bool)
                object.__setattr__(self, item.name, int(value) if good else value)
            else:
                good = isinstance(value, str)
            _require(good, f"{item.name} = {value!r}: expected {kind}, finite if a number")
        _require(len(self.nonce) == 64, f"nonce = {self.nonce!r}: expected 64 hexadecimal digits")


@dataclass(frozen=True)
class Genesis(_Row):
    """Row 0: what the run promised before its first round.

    ``epsilon`` and ``delta`` are None without differential privacy. ``noise_multiplier`` and ``sensitivity`` are None
    where they may differ between rounds (by a public schedule). ``configuration`` is the SHA-256 of all the
    configuration but what may change later; ``fingerprint`` that of what clients must agree to. ``carried`` is
    Σ 1/z² of the runs in ``previous``, rounded up: they spend from the same budget.
    """

    kind: ClassVar[str] = "genesis"

    fingerprint: str
    configuration: str
    run_id: str
    epsilon: float | None
    delta: float | None
    rounds: int
    calibration: str
    noise_multiplier: float | None
    sensitivity: float | None
    num_clients: int
    num_byzantine: int
    rule: str
    premises: tuple[str, ...]
    at: float
    mechanism: str = "gaussian"
    previous: tuple[str, ...] = ()
    carried: float = 0.0
    neighbouring: str = "one client's data replaced"
    version: int = 2
    nonce: str = field(default_factory=_nonce)

    def __post_init__(self) -> None:
        self._normalise()
        _require(self.rounds >= 1, f"rounds = {self.rounds}: expected at least 1")
        _require(
            (self.epsilon is None) == (self.delta is None),
            f"epsilon = {self.epsilon!r}, delta = {self.delta!r}: give both, or neither for no privacy",
        )
        _require(
            self.epsilon is None or self.noise_multiplier is None or self.noise_multiplier > 0,
            f"epsilon = {self.epsilon!r} with noise_multiplier = 0: no noise gives no guarantee",
        )
        _require(
            self.calibration in ("exact", "renyi"),
            f"calibration = {self.calibration!r}: expected 'exact' or 'renyi'",
        )
        _require(
            self.mechanism in _MECHANISMS, f"mechanism = {self.mechanism!r}: expected one of {', '.join(_MECHANISMS)}"
        )
        _require(
            (self.mechanism == "none") == (self.epsilon is None),
            f"mechanism = {self.mechanism!r} with epsilon = {self.epsilon!r}: noise and a promise go together",
        )
        _require(
            self.mechanism != "discrete" or self.calibration == "renyi",
            f"mechanism = 'discrete' with calibration = {self.calibration!r}: the discrete Gaussian is zCDP, and needs "
            "'renyi'",
        )
        _require(
            self.carried >= 0.0 and (self.carried == 0.0 or self.epsilon is not None),
            f"carried = {self.carried!r} with epsilon = {self.epsilon!r}: expected at least 0, and 0 without a budget",
        )
        _require(self.version == 2, f"version = {self.version}: this program reads ledgers of version 2")
        _require_members(self.num_clients, self.num_byzantine)


@dataclass(frozen=True)
class LedgerEntry(_Row):
    """One release: N(0, σ²) on every coordinate of an aggregate whose L2 sensitivity is S, σ = z S.

    ``mechanism`` is ``gaussian``, or ``discrete`` (the discrete Gaussian on the grid: the same Rényi divergences at
    most); a release without noise has ``none`` and z = σ = 0. ``at`` is in unix seconds.

    Raises
    ------
    PrivacyError
        A value is out of range, or σ is smaller than z S: the row would claim more privacy than was given.
    """

    kind: ClassVar[str] = "round"

    round_id: int
    noise_multiplier: float
    sensitivity: float
    sigma: float
    num_clients: int
    answers: int
    num_byzantine: int
    rule: str
    premises: tuple[str, ...]
    at: float
    mechanism: str = "gaussian"
    nonce: str = field(default_factory=_nonce)

    def __post_init__(self) -> None:
        self._normalise()
        _require(self.round_id >= 0, f"round_id = {self.round_id}: expected at least 0")
        _require_members(self.num_clients, self.num_byzantine)
        _require(
            0 <= self.answers <= self.num_clients,
            f"answers = {self.answers}: expected 0 to num_clients = {self.num_clients}",
        )
        _require(self.sensitivity >= 0, f"sensitivity = {self.sensitivity!r}: expected at least 0")
        _require(
            self.mechanism in _MECHANISMS, f"mechanism = {self.mechanism!r}: expected one of {', '.join(_MECHANISMS)}"
        )
        if self.mechanism == "none":
            _require(
                self.noise_multiplier == 0 and self.sigma == 0,
                f"mechanism none with noise_multiplier = {self.noise_multiplier!r}, sigma = {self.sigma!r}: expected 0",
            )
            return
        _require(
            self.noise_multiplier > 0 and self.sensitivity > 0,
            f"noise_multiplier = {self.noise_multiplier!r}, sensitivity = {self.sensitivity!r}: expected positive "
            "numbers; a release without noise has mechanism 'none'",
        )
        needed = Fraction(self.noise_multiplier) * Fraction(self.sensitivity)
        _require(
            Fraction(self.sigma) >= needed * Fraction(1 - _SLACK),
            f"sigma = {self.sigma!r} is below noise_multiplier · sensitivity = {float(needed)!r}: more noise is needed "
            "for what the row claims",
        )


def from_json(text: str) -> Genesis | LedgerEntry:
    """Read a row back.

    Raises
    ------
    StoreDamaged
        The text is not a row in canonical form, or its values are impossible.
    """
    try:
        values: dict[str, Any] = json.loads(text)
        row_type = {"genesis": Genesis, "round": LedgerEntry}[values.pop("kind")]
        row: Genesis | LedgerEntry = row_type(**values)
    except (ValueError, KeyError, TypeError, AttributeError, PrivacyError) as problem:
        raise StoreDamaged(f"a ledger row cannot be read ({problem}): {text[:200]!r}") from None
    if row.to_json() != text:
        raise StoreDamaged(f"a ledger row is not in canonical form: {text[:200]!r}")
    return row


def _require_members(num_clients: int, num_byzantine: int) -> None:
    _require(
        0 <= num_byzantine < num_clients,
        f"num_clients = {num_clients}, num_byzantine = {num_byzantine}: expected 0 <= num_byzantine < num_clients",
    )


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PrivacyError(otherwise)
