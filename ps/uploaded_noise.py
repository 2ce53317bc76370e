"""Noise that is on the GPU before the round closes: drawn on the host, ahead, and uploaded as soon as it is drawn.

Where it comes from is :mod:`common.noise`'s affair. Here it travels, and is scaled and rounded on the device: a
product, a division by a power of two, rounding to even, a product, all in float64. These are the operations, hence the
bits, of :class:`common.noise.RoundedGaussian` on the host.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from common.noise import Drawing, DrawnAhead, NoiseSource, check_scale

__all__ = ["UploadAhead", "UploadedGaussian"]


class UploadedGaussian:
    """Normals on a device, scaled and rounded there: a :class:`common.noise.GridNoise`.

    Parameters
    ----------
    draw
        ``(d,)`` float64, standard normal, fresh, and no longer the caller's: it becomes the noise.
    drawing
        When it was drawn, on the host.

    Raises
    ------
    ValueError
        The draw is not a float64 vector: float32 has too few bits to reach every multiple.
    """

    def __init__(self, draw: Tensor, drawing: Drawing | None = None) -> None:
        if draw.dtype != torch.float64 or draw.ndim != 1:
            raise ValueError(f"draw: {draw.dtype} of shape {tuple(draw.shape)}, expected a float64 vector (d,)")
        self._draw: Tensor | None = draw
        self.drawing = drawing

    def on_grid(self, sigma: float, grid: float) -> Tensor:
        """See :meth:`common.noise.GridNoise.on_grid`; it is on the device."""
        check_scale(sigma, grid)
        draw, self._draw = self._draw, None
        if draw is None:
            raise RuntimeError("this noise was added to a release already: draw new noise for another")
        return draw.mul_(sigma).div_(grid).round_().mul_(grid)

    def __reduce__(self) -> NoReturn:
        raise TypeError("the noise of a release is used once: it cannot be copied")


class UploadAhead(DrawnAhead[Tensor]):
    """As :class:`common.noise.NoiseAhead`, and the noise is on the device too when its time comes."""

    def __init__(self, source: NoiseSource, device: torch.device) -> None:
        # On the default stream, which the release uses too, and which has nothing else to do meanwhile.
        super().__init__(source, lambda draw: torch.from_numpy(draw).to(device))

    def of_round(self, round_id: int, d: int) -> UploadedGaussian:
        """The noise of ``round_id`` as a release takes it: to be rounded, on the device, to the release's grid."""
        return UploadedGaussian(*self.taken(round_id, d))
