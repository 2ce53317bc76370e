"""The same value in every coordinate."""

from __future__ import annotations

import torch
from torch import Tensor

from adversary.attacks.attack import Attack, Setting, Sight
from adversary.attacks.parameters import number

__all__ = ["SameValue"]


class SameValue(Attack):
    """The same value in every coordinate: all ones.

    Li et al. 2019, "RSA: Byzantine-Robust Stochastic Aggregation Methods"; Fed-NGA has ones too.

    Parameters
    ----------
    value
        The value, finite.

    Notes
    -----
    A constant direction, which momentum adds up; of norm √d times the value, far above C. Of Fed-NGA's attacks it hurts
    Fed-NGA itself most.
    """

    name = "same_value"
    source = "Li et al. 2019; Fed-NGA, NeurIPS 2025"

    def __init__(self, setting: Setting, *, value: float = 1.0) -> None:  # noqa: ARG002 - the interface
        self._value = number(self.name, "value", value)

    def __call__(self, sight: Sight) -> Tensor:
        return torch.full_like(sight.own, self._value)
