"""The canary: what one client's momentum hides, and how it is looked for in what was released.

A *cell* is one coordinate of one release. In world +1 the victim's momentum has +C u in a cell, in world −1 it has
−C u, with u = ±1. The other clients make that count for as much as it can: of the n − 1 of them, f hold −C u, f hold
+C u, the rest 0. Then the trimmed sum is +C u in one world and −C u in the other, so the aggregate moves by
2 C / (n − 2f), which is the sensitivity of CWTM in one coordinate: nothing moves it further.

With clip norm C √d all d coordinates hold a cell at once and the victim is still inside its ball. Each coordinate's
noise is its own, so each is a trial of its own: a million trials are forty releases of 26,010.

A trial of several cells has a *pattern* of signs s_1 … s_k for u. Its statistic is Σ s_j Y_j, standardised: where the
noise of its cells is independent every pattern sees the same; where it is shared, patterns of opposite signs see less
noise. One pattern is never enough: noise used twice looks *more* private to a constant one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["Across", "Canary", "Cells"]

Across = Literal["rounds", "neighbours", "halves", "starts"]

Cells = npt.NDArray[np.float64]
"""One number for each cell, ``(starts, rounds, coordinates)``, C-contiguous. A start is one life of a server."""


@dataclass(frozen=True)
class Canary:
    """How cells make up trials.

    Parameters
    ----------
    patterns
        Strings of ``+`` and ``-``, all of one length k, the number of cells of a trial. Trials are dealt to them in
        turn, and counted apart.
    across
        Where the k cells of a trial lie: one coordinate in k rounds that follow each other (``rounds``), k coordinates
        of one round that are ``neighbours`` or lie d/k apart (``halves``), or one coordinate in the t-th round after
        each of k ``starts``.

    Raises
    ------
    ValueError
        The patterns are none, or not of one length, or not of + and -.

    Examples
    --------
    >>> canary = Canary(("+-",), across="neighbours")
    >>> signs = canary.signs((1, 1, 4), np.random.default_rng(0))
    >>> canary.statistics(signs, signs)["+-"] / np.sqrt(2)
    array([1., 1.])
    """

    patterns: tuple[str, ...] = ("+",)
    across: Across = "rounds"

    def __post_init__(self) -> None:
        lengths = {len(pattern) for pattern in self.patterns}
        if len(lengths) != 1 or 0 in lengths or not set("".join(self.patterns)) <= {"+", "-"}:
            raise ValueError(f"patterns = {self.patterns!r}: expected strings of + and -, all of one length")

    @property
    def cells_per_trial(self) -> int:
        """k."""
        return len(self.patterns[0])

    def signs(self, shape: tuple[int, int, int], random: np.random.Generator) -> Cells:
        """u of every cell: the trial's pattern, turned around as a whole at random.

        Parameters
        ----------
        shape
            (starts, rounds, coordinates).
        random
            Public randomness: every direction is tried, in the same way in both worlds.

        Raises
        ------
        ValueError
            The shape does not divide into trials.
        """
        signs = np.empty(shape)
        trials = self._trials(signs)
        trials[...] = random.choice((-1.0, 1.0), size=trials.shape[:-1])[..., None]
        for number, pattern in enumerate(self.patterns):
            trials[..., number :: len(self.patterns), :] *= [1.0 if sign == "+" else -1.0 for sign in pattern]
        return signs

    def statistics(self, cells: Cells, signs: Cells) -> dict[str, npt.NDArray[np.float64]]:
        """Σ s_j Y_j / √k of every trial, by pattern: with Y in units of its noise, of variance 1.

        Parameters
        ----------
        cells
            Y of every cell.
        signs
            As :meth:`signs` returned them.
        """
        sums = self._trials(cells * signs).sum(axis=-1) / np.sqrt(self.cells_per_trial)
        every = len(self.patterns)
        return {pattern: sums[..., number::every].ravel() for number, pattern in enumerate(self.patterns)}

    def trials(self, shape: tuple[int, int, int]) -> dict[str, int]:
        """How many trials of each pattern there will be: fixed before the first one."""
        empty = np.broadcast_to(0.0, shape)
        return {pattern: values.size for pattern, values in self.statistics(empty, empty).items()}

    def _trials(self, cells: Cells) -> Cells:
        """The cells as ``(…, trials, k)``; a view of a contiguous array."""
        starts, rounds, coordinates = cells.shape
        k = self.cells_per_trial
        length = starts if self.across == "starts" else rounds if self.across == "rounds" else coordinates
        if length % k or (self.across == "starts" and starts != k):
            raise ValueError(f"{cells.shape} cells do not divide into trials of {k} across {self.across}")
        match self.across:
            case "starts":
                return np.moveaxis(cells, 0, -1)
            case "rounds":
                return np.moveaxis(cells.reshape(starts, rounds // k, k, coordinates), 2, -1)
            case "neighbours":
                return cells.reshape(starts, rounds, coordinates // k, k)
            case "halves":
                return np.moveaxis(cells.reshape(starts, rounds, k, coordinates // k), 2, -1)
