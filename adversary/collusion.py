"""What colluding identities know: where their estimate of the honest momenta comes from."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Colluding", "Ignorant", "Knowledge"]


class Knowledge(Protocol):
    """A source of estimates of the honest momenta."""

    async def estimate(self, round_id: int, own: torch.Tensor) -> torch.Tensor:
        """Estimates (h, d) for a round, given the adversaries' own honest momenta (k, d)."""
        ...


class Ignorant:
    """Knows only the published models: no estimate (0, d)."""

    async def estimate(self, round_id: int, own: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return own[:0]


class Colluding:
    """Takes what the colluders' own data would have made honest clients send. Needs nothing of anyone else's."""

    async def estimate(self, round_id: int, own: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return own
