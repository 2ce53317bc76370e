"""Bit flip: send the direction that undoes training."""

from __future__ import annotations

import torch
from torch import Tensor

from adversary.attacks.attack import Setting
from common.errors import AttackError

__all__ = ["BitFlip"]


class BitFlip:
    """The mean of the honest momenta, reversed.

    Parameters
    ----------
    setting
        For the clip norm.
    own
        Each adversary reverses its own momentum instead, and needs to know nothing of others
        (Karimireddy et al. 2022).
    scale_to_clip_norm
        Stretch what is sent to norm C, the longest that clipping lets through. A zero vector stays zero.

    Raises
    ------
    AttackError
        Scaling without a clip norm.
    """

    name = "bit_flip"

    def __init__(self, setting: Setting, *, own: bool = False, scale_to_clip_norm: bool = False) -> None:
        for option, value in (("own", own), ("scale_to_clip_norm", scale_to_clip_norm)):
            if not isinstance(value, bool):
                raise AttackError(f"bit_flip: {option} = {value!r}: expected true or false")
        if scale_to_clip_norm and setting.clip_norm is None:
            raise AttackError("bit_flip: scale_to_clip_norm needs training.clip_norm")
        self.needs_estimate = not own
        self._own = own
        self._norm = setting.clip_norm if scale_to_clip_norm else None

    def __call__(self, honest: Tensor, own: Tensor, round_id: int) -> Tensor:
        if self._own:
            rows = own.neg()
        elif honest.shape[0] > 0:
            rows = honest.mean(dim=0).neg_().expand(own.shape[0], -1)
        else:
            raise AttackError(f"bit_flip needs an estimate of the honest momenta; given no rows in round {round_id}")
        if self._norm is None:
            return rows.clone()
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
        factors = torch.where(norms > 0, self._norm / norms, 0.0)
        return (rows * factors).to(torch.float32)
