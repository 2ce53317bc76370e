"""The honest client's half of Algorithm 1: minibatch gradient, clip, momentum.

g   = ∇f_i(θ_t; batch)            batch drawn by the stream (seed, "batch", client, round)
g   = g · min(1, C / ‖g‖)         ‖g‖ = 0 stays 0; a non-finite g counts as 0
m_i = α m_i + (1 − α) g           m_i = 0 before round 0, so ‖m_i‖ ≤ C
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from client.memory import Held
from common.config import Training
from common.learning.datasets import Dataset, to_tensor
from common.learning.gradient import FlatModel
from common.randomness import stream, stream_key

__all__ = ["Worker", "batch_of", "clip_to", "next_momentum"]


def clip_to(vector: torch.Tensor, clip_norm: float | None) -> torch.Tensor:
    """Scale a float32 vector (d,) in place to an L2 norm of at most ``clip_norm``; non-finite becomes zero."""
    norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
    if not np.isfinite(norm):
        return vector.zero_()
    if clip_norm is not None and norm > clip_norm:
        vector.mul_(clip_norm / norm)
    return vector


def next_momentum(
    momentum: torch.Tensor,
    gradient: torch.Tensor,
    *,
    clip_norm: float | None,
    alpha: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """m_i after a round, float32 (d,): clip the gradient (in place), and average; ``out`` may be ``momentum``."""
    clip_to(gradient, clip_norm)
    return torch.mul(momentum, alpha, out=out).add_(gradient, alpha=1 - alpha)


def batch_of(
    indices: npt.NDArray[np.int64], training: Training, *, client_id: int, round_id: int
) -> npt.NDArray[np.int64]:
    """Indices of a round's minibatch, drawn without replacement; all of the data if there is less than a batch."""
    size = min(training.batch_size, len(indices))
    random = stream(training.seed, "batch", client=client_id, round_id=round_id)
    return indices[random.choice(len(indices), size=size, replace=False)]


class Worker:
    """One logical client: its identity, its data, its momentum.

    Parameters
    ----------
    client_id
        The identity.
    model
        Shared by the workers of a process; they use it one after the other.
    dataset, indices
        The training set and this client's share of it, sorted.
    """

    def __init__(
        self,
        client_id: int,
        model: FlatModel,
        dataset: Dataset,
        indices: npt.NDArray[np.int64],
        training: Training,
        *,
        l2: float = 0.0,
    ) -> None:
        self.client_id = client_id
        self._model, self._dataset, self._indices, self._training, self._l2 = model, dataset, indices, training, l2
        self._client_momentum = training.schedule_of("client_momentum")
        # One attribute, so that a reader in another thread never sees the momentum of one round under another's number.
        self._held = (-1, torch.zeros(model.num_parameters, dtype=torch.float32))

    def step(self, round_id: int) -> npt.NDArray[np.float32]:
        """The momentum (d,) of a round, at the parameters the shared model holds.

        A round asked for again (the parameter server restarted before it closed) gets the same momentum again.
        """
        last_round, momentum = self._held
        if round_id != last_round:
            # A new tensor each round: the old one may still be on its way to the network.
            momentum = next_momentum(
                momentum,
                self._gradient(round_id),
                clip_norm=self._training.clip_norm,
                alpha=self._client_momentum(round_id),
            )
            self._held = (round_id, momentum)
        return momentum.numpy()

    @property
    def held(self) -> Held:
        """The latest momentum and its round; it is never changed afterwards."""
        round_id, momentum = self._held
        return Held(round_id, momentum.numpy())

    def restore(self, held: Held) -> None:
        """Go on from a momentum of an earlier life.

        Rounds in between are lost: m_i may be any point of the ball.
        """
        self._held = (held.round_id, torch.from_numpy(held.momentum.astype(np.float32)))

    def _gradient(self, round_id: int) -> torch.Tensor:
        batch = batch_of(self._indices, self._training, client_id=self.client_id, round_id=round_id)
        inputs, labels = to_tensor(self._dataset.train, batch, self._dataset)
        seed = stream_key(self._training.seed, "dropout", client=self.client_id, round_id=round_id)
        return self._model.gradient(inputs, labels, self._l2, seed=seed)
