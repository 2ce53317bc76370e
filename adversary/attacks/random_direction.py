"""A random direction, as long as clipping lets through."""

from __future__ import annotations

import torch
from torch import Tensor

from adversary.attacks.attack import Attack, Setting, Sight
from adversary.attacks.parameters import flag, length
from common.randomness import stream

__all__ = ["RandomDirection"]


class RandomDirection(Attack):
    """A uniformly random direction, of norm C.

    Parameters
    ----------
    setting
        For C and the seed: the stream (seed, "attack/random_direction", t) of round t, or of no round.
    norm
        The length; default the clip norm.
    fixed
        One direction for the whole run, which momentum adds up; otherwise a new one in each round.
    shared
        All adversaries take the same one; otherwise each its own.

    Raises
    ------
    AttackError
        No norm is given, and there is no clip norm.

    Notes
    -----
    What clipping and DP noise are up against without any knowledge. In d dimensions a random direction has only a
    share of 1/√d along any given one, so it disturbs little.
    """

    name = "random_direction"
    source = "folklore"

    def __init__(
        self, setting: Setting, *, norm: float | None = None, fixed: bool = False, shared: bool = True
    ) -> None:
        self._seed, self._norm = setting.seed, length(self.name, "norm", norm, setting)
        self._fixed, self._shared = flag(self.name, "fixed", fixed), flag(self.name, "shared", shared)

    def __call__(self, sight: Sight) -> Tensor:
        k, d = sight.own.shape
        random = stream(self._seed, "attack/random_direction", round_id=-1 if self._fixed else sight.round_id)
        rows = torch.from_numpy(random.standard_normal((1 if self._shared else k, d), dtype="float32"))
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        return rows.mul_(self._norm).div_(norms).expand(k, -1).clone()
