"""What a privacy claim rests on, and whether a run may be called private at all.

Every claim of the product names its premises; a claim without them would be false.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from common.errors import PrivacyError

__all__ = ["KNOWN", "P2", "premises_of", "privacy_status"]

P1 = "P1: one person holds one identity; holding k of them multiplies mu by k"
P2 = (
    "P2: given the released models, who else takes part and when, and every time visible outside the parameter server, "
    "are independent of the protected client's data"
)
P3 = "P3: whether a client fails, or misses the close of a round, does not depend on another client's data"
P4 = (
    "P4: what Byzantine clients send depends on the protected client's data only through the released models, "
    "so they have not read honest momenta"
)
P5 = (
    "P5: whether any client answers, the protected one included, does not depend on the protected client's data "
    "(absent clients are left out, not zero)"
)

KNOWN = (P1, P2, P3, P4, P5)

_WIRETAP = "the wiretap showed honest momenta to the adversary"


def premises_of(
    *,
    strict: bool = False,
    round_timing: Literal["adaptive", "fixed"] = "adaptive",
    rescale: bool = False,
    previous: Sequence[str] = (),
) -> tuple[str, ...]:
    """The premises of a run's claim, each a sentence that opens with its name.

    ``round_timing = "fixed"`` (rounds close and publish on a public schedule) removes P2; ``strict`` (calibrated for
    adversaries that read honest momenta) removes P4, and needs the fixed schedule; ``rescale`` (absent clients are
    left out) adds P5. The premises of ``previous`` runs on the same budget are this run's too.

    Raises
    ------
    PrivacyError
        ``strict`` with rounds that are not on a fixed schedule or with absent clients left out, or an unknown
        ``round_timing``.
    """
    if round_timing not in ("adaptive", "fixed"):
        raise PrivacyError(f"round_timing = {round_timing!r}: expected 'adaptive' or 'fixed'")
    if strict and round_timing != "fixed":
        raise PrivacyError("strict with round_timing = 'adaptive': adversaries could tell by time; use 'fixed'")
    if strict and rescale:
        raise PrivacyError("strict with missing = 'rescale': adversaries could tell by who answers; use 'zero'")
    own = {P1, P3, *(() if round_timing == "fixed" else (P2,)), *(() if strict else (P4,)), *((P5,) if rescale else ())}
    return tuple(sorted(own | set(previous)))


def privacy_status(
    *,
    epsilon: float | None,
    delta: float | None = None,
    wiretap: bool = False,
    noise_secret: bool = True,
    copied_data: bool = False,
    premises: Sequence[str] | None = None,
) -> tuple[bool, str]:
    """Whether a run is private, and the sentence that says why: ``private`` and ``private_because`` of a summary.

    Parameters
    ----------
    epsilon, delta
        The budget's; ``epsilon`` is None when no privacy was asked for.
    wiretap
        Whether the research service that shows honest momenta was on.
    noise_secret
        Whether the noise came from a source nobody can repeat.
    copied_data
        Whether adversaries were given copies of honest clients' data, which P4 excludes.
    premises
        As :func:`premises_of` gives them; its default ones if None.

    Raises
    ------
    PrivacyError
        ``epsilon`` without ``delta``.
    """
    if epsilon is not None and delta is None:
        raise PrivacyError(f"epsilon = {epsilon!r} without delta: a claim needs both")
    reasons = []
    if epsilon is None:
        reasons.append("no noise was asked for (privacy.epsilon is not set)")
    if wiretap:
        reasons.append(_WIRETAP)
    if epsilon is not None and not noise_secret:
        reasons.append("privacy.noise_seed fixes the noise")
    strict = premises is not None and not any(premise.startswith("P4") for premise in premises)
    if copied_data and epsilon is not None and not strict:
        reasons.append("adversaries were dealt copies of honest clients' data (data.deal_to = honest)")
    if reasons == [_WIRETAP] and strict:
        return False, (
            f"not private: {_WIRETAP}; whoever sees the published models alone: (ε = {epsilon:g}, δ = {delta:g}) under "
            f"the strict premise"
        )
    if reasons:
        return False, "not private: " + "; ".join(reasons)
    names = [premise.partition(":")[0] for premise in (premises_of() if premises is None else premises)]
    spelled = "P1-P4" if names == ["P1", "P2", "P3", "P4"] else ", ".join(names)
    return True, f"user-level (ε = {epsilon:g}, δ = {delta:g})-DP under premises {spelled}"
