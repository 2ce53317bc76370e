"""Centered clipping (CClip): a mean of differences from a public centre, each clipped."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from common.aggregation.checks import count, positive
from common.aggregation.rows import combine, squared_norms
from common.aggregation.rule import RoundContext, Rule

__all__ = ["CenteredClipping"]

_ROUNDING = 2.0**-30


class CenteredClipping(Rule):
    """v ← v + (1/n) Σ clip(x_i - v, τ), L times, from a public centre v.

    Karimireddy, He & Jaggi 2021, "Learning from History for Byzantine Robust Optimization". It is (δ, c)-robust, not
    (f, κ)-robust for any κ.

    Parameters
    ----------
    radius
        τ; the literature's 10/(1 - β) for momentum that adds up is 10 for momentum that averages, as ours.
    iterations
        L.

    The centre is the context's, which must be 0 or the last *released* aggregate; without one it is 0. The rule keeps
    no memory: a centre that was never released would not be covered by the sensitivity.

    Sensitivity
        min(2C, L · min(2τ, 2C)/n), for any public centre: clipping moves no two vectors apart and bounds each by τ,
        and an iteration does not widen the gap between two centres. Attained for L = 1. Strict: f + 1 times as much,
        at most 2C. With server momentum inside the rule C becomes (1 - β) C. A share of 2⁻³⁰ is added for the float64
        arithmetic, enough while n (1 + ‖v‖/C) < 2^20. The 2C is that of projecting the output.
    Complexity
        O(L n d) time, in two passes an iteration; O(d) memory.

    =============================  =======================================================
    edge case                      outcome
    =============================  =======================================================
    x_i = v                        contributes nothing
    non-finite row                 the zero vector
    1e30 in a row                  clipped to τ, its direction kept
    any f, n = 2f + 1              nothing special; f is not used
    zero norm, all equal           nothing special
    ties                           nothing to choose
    d = 1                          a mean of clamped differences
    more than 2^24 elements        nothing special
    =============================  =======================================================
    """

    name = "centered_clipping"
    project_output = False
    lipschitz = True

    def __init__(self, *, num_byzantine: int, radius: float = 10.0, iterations: int = 1) -> None:
        super().__init__(num_byzantine=num_byzantine)
        self.radius = positive(self.name, "radius", radius)
        self.iterations = count(self.name, "iterations", iterations)

    def proved_sensitivity(self, *, num_clients: int, clip_norm: float, changed: int = 1) -> float:
        self.require(num_clients)
        moved = min(2.0 * self.radius, 2.0 * clip_norm) * (1.0 + _ROUNDING)
        return changed * self.iterations * moved / num_clients

    def aggregate(self, x: Tensor, context: RoundContext | None) -> Tensor:
        n, d = x.shape
        given = None if context is None else context.centre
        centre = None if given is None else given.detach().to(device=x.device, dtype=torch.float64)
        for _ in range(self.iterations):
            distances = np.sqrt(squared_norms(x, centre))
            bad = ~np.isfinite(distances)
            if bad.any():
                distances[bad] = 0.0 if centre is None else float(torch.linalg.vector_norm(centre))
            factors = np.minimum(1.0, np.divide(self.radius, distances, out=np.ones(n), where=distances > 0.0)) / n
            step = combine(x, np.where(bad, 0.0, factors))
            # v + Σ c_i (x_i - v), multiplied out: the rows are read once more, not their differences.
            centre = step if centre is None else centre * (1.0 - factors.sum()) + step
        return torch.zeros(d, dtype=torch.float64, device=x.device) if centre is None else centre
