"""Deviations as large as the honest spread hides: what min-max and min-sum have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adversary.attacks.attack import Collusion, Setting, Sight
from adversary.attacks.parameters import choice

__all__ = ["Spread", "WithinSpread"]

DIRECTIONS = ("unit", "sign", "std")
_COLUMNS = 1 << 16  # of a block; float64 copies are made of one block at a time
_ROUNDING = 1e-6  # taken off γ, so that rounding to float32 does not carry the vector over the bound

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """How the honest momenta g_i lie about their mean μ, and along the direction p of the deviation.

    Attributes
    ----------
    gram
        float64 (h, h): ⟨g_i - μ, g_j - μ⟩.
    along
        float64 (h,): ⟨p, g_i - μ⟩.
    squared_norm
        ‖p‖².
    """

    gram: Matrix
    along: Matrix
    squared_norm: float

    @property
    def from_mean(self) -> Matrix:
        """float64 (h,): ‖g_i - μ‖²."""
        return np.diagonal(self.gram)

    @property
    def squared_distances(self) -> Matrix:
        """float64 (h, h): ‖g_i - g_j‖², at least 0."""
        return np.maximum(self.from_mean[:, None] + self.from_mean - 2.0 * self.gram, 0.0)


class WithinSpread(Collusion):
    """μ + γ p with the largest γ that a bound allows; p reverses the mean, its signs, or the standard deviations.

    Parameters
    ----------
    direction
        p: "unit" is -μ, "sign" -sign(μ), "std" minus the standard deviations. Its length does not matter.
    """

    source = "Shejwalkar & Houmansadr 2021"

    def __init__(self, setting: Setting, *, direction: str = "unit") -> None:  # noqa: ARG002 - the interface
        self._direction = choice(self.name, "direction", direction, DIRECTIONS)

    @abstractmethod
    def largest(self, spread: Spread) -> float:
        """The largest γ of at least 0 within the bound; ‖p‖ is not 0."""

    def vector(self, sight: Sight) -> Tensor:
        h, d = sight.honest.shape
        gram, along, squared_norm = np.zeros((h, h)), np.zeros(h), 0.0
        for _, _, centred, p in self._blocks(sight.honest):
            gram += (centred @ centred.T).numpy()
            along += (centred @ p).numpy()
            squared_norm += float(p @ p)
        gamma = 0.0
        if squared_norm > 0.0:
            gamma = max(0.0, self.largest(Spread(gram, along, squared_norm))) * (1.0 - _ROUNDING)
        result = torch.empty(d, dtype=torch.float32)
        for columns, mean, _, p in self._blocks(sight.honest):
            result[columns] = mean.add_(p, alpha=gamma).to(torch.float32)
        return result

    def _blocks(self, honest: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Columns, and in float64 their μ (c,), g_i - μ (h, c) and p (c,)."""
        h, d = honest.shape
        for start in range(0, d, _COLUMNS):
            columns = slice(start, min(start + _COLUMNS, d))
            block = honest[:, columns].to(torch.float64)
            mean = block.mean(dim=0)
            centred = block - mean
            match self._direction:
                case "unit":
                    p = mean.neg()
                case "sign":
                    p = mean.sign().neg_()
                case _:
                    p = (centred.square().sum(dim=0) / max(1, h - 1)).sqrt_().neg_()
            yield columns, mean, centred, p
