"""Whether a run can be expected to learn, and how many clients it would take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ps.privacy.signal import Learning, learning_of, smallest

if TYPE_CHECKING:
    from common.schedules import Schedule
    from ps.release import Mechanism

__all__ = ["LEARNS", "Course", "Mechanisms", "cannot_learn"]

LEARNS, HOPELESS = 1.0, 0.25
"""Signal over noise below which a run is not expected to learn well, or anything; docs/planning.md has the runs."""


@dataclass(frozen=True)
class Mechanisms:
    """The mechanisms of one rule and one number, or share, of Byzantine clients, for any n."""

    rule: str
    byzantine: int | Fraction = 0
    clip_norm: float | None = 1.0
    strict: bool = False
    inside: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict)
    folders: Sequence[Path] = ()

    def of(self, n: int, z: float, *, strict: bool | None = None, weights: Sequence[float] | None = None) -> Mechanism:
        """That of n clients with multiplier z.

        Raises
        ------
        RuleError, PrivacyError
            As :class:`ps.release.Mechanism` and :func:`common.aggregation.make_rule` do.
        """
        from common.aggregation import make_rule  # torch, only where a rule is in the question
        from ps.release import Mechanism

        f = self.byzantine_of(n)
        rule = make_rule(self.rule, num_byzantine=f, folders=self.folders, **self.parameters)
        if weights is not None:
            rule = rule.with_weights(weights)
        return Mechanism(rule, n, f, self.clip_norm, z, self.strict if strict is None else strict, self.inside)

    def byzantine_of(self, n: int) -> int:
        """f: the number itself, or as many as the share of n allows."""
        return self.byzantine if isinstance(self.byzantine, int) else math.floor(self.byzantine * n)

    @property
    def share(self) -> Fraction:
        """0 for a fixed number."""
        return Fraction(0) if isinstance(self.byzantine, int) else self.byzantine


@dataclass(frozen=True)
class Course:
    """What signal and noise depend on, beside the mechanism.

    Parameters
    ----------
    num_parameters
        d.
    learning_rate, server_momentum
        η_t and β_t.
    rounds
        T; or None, for constant η and many rounds, and then
    mu
        what all releases compose to.
    """

    num_parameters: int
    learning_rate: Schedule
    server_momentum: Schedule
    rounds: int | None
    mu: float | None = None

    def learning(self, mechanism: Mechanism) -> Learning:
        """Signal and noise of this mechanism."""
        return learning_of(
            mechanism, self.num_parameters, self.learning_rate, self.server_momentum, self.rounds, self.mu
        )

    def clients_needed(self, mechanisms: Mechanisms, z: float, wanted: float) -> int | None:
        """The smallest n with which the signal is ``wanted`` times the noise."""

        def ratio_of(n: int) -> float | None:
            return self.learning(mechanisms.of(n, z)).ratio if mechanisms.byzantine_of(n) < n else None

        return smallest(ratio_of, wanted, mechanisms.share)


def cannot_learn(
    ratio: float, needed: int | None, wanted: float, epsilon: float | None, num_parameters: int, mechanisms: Mechanisms
) -> str:
    """The sentence before a run that cannot be expected to learn well: why, and what helps."""
    f = mechanisms.byzantine
    if needed is None:
        under = " under the strict premise, with as large a share of them Byzantine," if mechanisms.strict else ""
        remedy = f"No number of clients helps {mechanisms.rule} here{under or ':'} its S does not fall with them"
    else:
        held = f"{f} of them" if isinstance(f, int) else f"{float(100 * f):.3g}% of them"
        at = f"d = {num_parameters}" + ("" if epsilon is None else f" and epsilon = {epsilon:.4g}")
        remedy = f"{needed} clients, {held} Byzantine, would bring that to {wanted:g} at {at}"
    verdict = "learn" if ratio < HOPELESS else "learn well"
    return (
        f"this run is not expected to {verdict}: noise moves the model {1 / ratio:.3g} times as far as training can at "
        f"most (a signal-to-noise ratio of {ratio:.3g}, below {LEARNS:g}). {remedy}; a larger epsilon, fewer "
        f"parameters or fewer Byzantine clients to tolerate raise it too; rounds, learning rate and clip norm hardly "
        f"change it"
    )
