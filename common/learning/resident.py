"""Samples that lie on the device where they are used, so that a batch is a gather and not a transfer."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from common.learning.datasets import Dataset, Split, affine

__all__ = ["ResidentSplit"]


class ResidentSplit:
    """A part of a data set on a device: :func:`common.learning.datasets.to_tensor` without the way there.

    Parameters
    ----------
    split, dataset
        The samples, copied as they are stored (bytes stay bytes), and whose normalisation applies.
    device
        Where to.
    """

    def __init__(self, split: Split, dataset: Dataset, device: torch.device) -> None:
        self._device = device
        images = torch.from_numpy(np.array(split.images)).to(device)
        from_bytes = split.images.dtype == np.uint8
        if from_bytes and images.ndim == 4:
            images = images.permute(0, 3, 1, 2).contiguous()
        self._images = images.reshape(len(split), *split.input_shape)
        self._labels = torch.from_numpy(np.array(split.labels, dtype=np.int64)).to(device)
        shift, scale = affine(dataset.mean, dataset.std, from_bytes)
        self._affine = (shift.to(device), scale.to(device)) if dataset.mean or from_bytes else None

    def take(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Images float32 (b, C, H, W) and labels int64 (b,) of int64 indices (b,)."""
        chosen = torch.from_numpy(indices).to(self._device, non_blocking=True)
        images = self._images.index_select(0, chosen)
        if self._affine is not None:
            images = torch.addcmul(*self._affine, images.to(torch.float32))
        return images, self._labels.index_select(0, chosen)
