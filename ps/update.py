"""Algorithm 1 of ByzULDP at the server, as pure functions: release, server momentum, model step.

    Y = rule(m_1 … m_n) + N(0, σ² I)      R = β R + (1 - β) Y      θ = θ - η R

The networked server, the simulation and the benchmarks call these, in this order, and nothing else. Only Y, and what is
computed from it, ever leaves the server.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.aggregation import RoundContext
from common.aggregation import step as steps
from common.errors import RunFailed
from common.randomness import stream
from ps.privacy.released import Unreleased
from ps.release import Answered, Mechanism, Noise, Shift, release, who_answered

__all__ = [
    "Mechanism",
    "Released",
    "ServerState",
    "Shift",
    "advance",
    "context_of",
    "initial_state",
    "release",
    "release_round",
]

_FURTHEST = 2.0**19


@dataclass(frozen=True)
class ServerState:
    """What the server knows before round ``round_id``: θ and R, float32 (d,)."""

    round_id: int
    theta: Tensor
    momentum: Tensor


def initial_state(theta: Tensor) -> ServerState:
    """Before round 0: R = 0."""
    return ServerState(0, theta, torch.zeros_like(theta))


@dataclass(frozen=True)
class Released:
    """Y of a round, float32 (d,), and what the ledger has to say of it.

    Attributes
    ----------
    vector
        Y.
    sensitivity, sigma
        What was charged for, and the noise that was added; both 0 without DP.
    server_momentum
        The β that is still to be applied, outside the rule; 0 where the rule had it inside.
    """

    vector: Tensor
    sensitivity: float
    sigma: float
    server_momentum: float


def release_round(
    mechanism: Mechanism,
    state: ServerState,
    rows: Unreleased[Tensor],
    answered: Answered,
    noise: Noise | None,
    *,
    server_momentum: float,
    seed: int,
) -> Released:
    """The first half of a round: aggregate and add noise. :func:`advance` is the other.

    Parameters
    ----------
    mechanism, rows, answered, noise
        As :func:`ps.release.release` takes them.
    state
        θ and R before this round.
    server_momentum
        β of this round.
    seed
        The experiment's: of the public random streams that a rule may use.
    """
    shift = Shift(server_momentum, state.momentum) if mechanism.inside else None
    context = context_of(mechanism, state, seed)
    present = mechanism.counted(int(who_answered(answered, mechanism.num_clients).sum()))
    return Released(
        vector=release(mechanism, rows, answered, noise, context, shift),
        sensitivity=mechanism.charged_sensitivity(len(state.theta), shift, present) if mechanism.private else 0.0,
        sigma=mechanism.charged_sigma(len(state.theta), shift, present),
        server_momentum=0.0 if mechanism.inside else server_momentum,
    )


def advance(state: ServerState, released: Tensor, learning_rate: float, server_momentum: float) -> ServerState:
    """The state before the next round, from Y alone: post-processing.

    Parameters
    ----------
    state
        θ and R before this round; not modified.
    released
        Y, float32 (d,).
    learning_rate, server_momentum
        η and β of this round.

    Raises
    ------
    RunFailed
        θ would not be finite.
    """
    momentum = steps.server_momentum(state.momentum, released, server_momentum)
    theta = steps.model_step(state.theta, momentum, learning_rate)
    if not bool(torch.isfinite(theta).all()):
        raise RunFailed(
            f"round {state.round_id} would publish a non-finite model: the released aggregate is too large or not "
            f"finite; lower training.learning_rate, or choose a robust aggregation.rule if clients may lie"
        )
    return ServerState(state.round_id + 1, theta, momentum)


def _near(centre: Tensor, mechanism: Mechanism) -> Tensor:
    """A released centre, no further than float32 allows for under DP: post-processing.

    A rule's allowance for its own rounding is relative to C while n (1 + ‖centre‖/C) stays below 2^20.
    """
    if not mechanism.private:
        return centre
    furthest = mechanism.radius * _FURTHEST / mechanism.num_clients
    norm = float(torch.linalg.vector_norm(centre, dtype=torch.float64))
    return centre if norm <= furthest else centre.mul(furthest / norm)


def context_of(mechanism: Mechanism, state: ServerState, seed: int) -> RoundContext:
    """What the rule may know of a round: public weights, the last released R as centre, a public random stream."""
    weights = getattr(mechanism.rule, "weights", None)
    # An exact sum looks at its rows alone, and the centre's norm takes time.
    looks_for_centre = "centre" in mechanism.rule.needs or not mechanism.sums_exactly()
    return RoundContext(
        round_id=state.round_id,
        weights=None if weights is None else torch.as_tensor(weights, dtype=torch.float64),
        centre=_near(state.momentum, mechanism) if looks_for_centre else None,
        generator=stream(seed, "rule", round_id=state.round_id),
    )
