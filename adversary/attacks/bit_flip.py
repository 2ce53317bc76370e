"""Bit flip: send the direction that undoes training."""

from __future__ import annotations

import torch
from torch import Tensor

from adversary.attacks.attack import Attack, Setting, Sight, require_estimate, rows_of
from adversary.attacks.parameters import flag
from common.errors import AttackError

__all__ = ["BitFlip"]


class BitFlip(Attack):
    """The honest mean, reversed: -μ; or each its own momentum, reversed.

    Karimireddy et al. 2022, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", in which each
    Byzantine client reverses its own gradient.

    Parameters
    ----------
    setting
        For the clip norm.
    own
        Each adversary reverses its own momentum, and needs to know nothing of others.
    scale_to_clip_norm
        Stretch what is sent to norm C, the longest that clipping lets through. A zero vector stays zero.

    Raises
    ------
    AttackError
        Scaling without a clip norm.

    Notes
    -----
    Unscaled, it takes a mean of n vectors back by 2k/n of its length: 0.4 for 4 of 20. Honest means are short when
    clients hold different data, so scaling to C is what makes it strong.
    """

    name = "bit_flip"
    needs = "an estimate of honest momenta"
    source = "Karimireddy et al. 2022"
    needs_estimate = True

    def __init__(self, setting: Setting, *, own: bool = False, scale_to_clip_norm: bool = False) -> None:
        self._own = flag(self.name, "own", own)
        if flag(self.name, "scale_to_clip_norm", scale_to_clip_norm) and setting.clip_norm is None:
            raise AttackError("bit_flip: scale_to_clip_norm needs training.clip_norm")
        self.needs_estimate = not self._own
        self._norm = setting.clip_norm if scale_to_clip_norm else None

    def __call__(self, sight: Sight) -> Tensor:
        if self._own:
            rows = sight.own.neg()
        else:
            require_estimate(self.name, sight)
            rows = rows_of(sight.honest.mean(dim=0).neg_(), sight)
        if self._norm is None:
            return rows
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
        factors = torch.where(norms > 0, self._norm / norms, 0.0)
        return (rows * factors).to(torch.float32)
