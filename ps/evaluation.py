"""Evaluation beside the rounds: accuracy on the public test set, on a thread of low priority.

Published models are copied into a short queue; the thread works through it while the rounds go on. Test accuracy on
public data is post-processing of what was released, so it costs no privacy.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.learning.datasets import Dataset
from common.learning.gradient import FlatModel, accuracy

__all__ = ["Evaluator", "Score"]

log = logging.getLogger("byzuldp.ps.evaluation")

WAITING_MODELS = 16
"""Models that may wait; beyond that one is left out, and said to be, rather than memory used without bound."""


@dataclass(frozen=True)
class Score:
    """How well θ of a round does on the test set."""

    round_id: int
    accuracy: float
    loss: float
    images: int


class Evaluator:
    """Scores models in the order they are offered.

    Parameters
    ----------
    images
        How many test images a score along the way uses (None: all); the last score uses all.
    record
        Called with each score, on the evaluator's thread.
    """

    def __init__(
        self, model: FlatModel, dataset: Dataset, *, images: int | None, record: Callable[[Score], None]
    ) -> None:
        self._model, self._dataset, self._images, self._record = model, dataset, images, record
        self._waiting: queue.Queue[tuple[int, npt.NDArray[np.float32]] | None] = queue.Queue(WAITING_MODELS)
        self._thread = threading.Thread(target=self._work, name="evaluation", daemon=True)
        self._thread.start()

    def offer(self, round_id: int, theta: npt.NDArray[np.float32], *, patiently: bool = False) -> None:
        """Score a model later; never waits, unless ``patiently``: then no model is left out."""
        if patiently:
            self._waiting.put((round_id, theta))
            return
        try:
            self._waiting.put_nowait((round_id, theta))
        except queue.Full:
            log.warning("evaluation is behind: the model of round %d is not scored", round_id)

    def finish(self, round_id: int, theta: npt.NDArray[np.float32]) -> Score:
        """Wait for the models offered so far, then score the last one on the whole test set."""
        self._waiting.put(None)
        self._thread.join()
        score = self._score(round_id, theta, None)
        self._record(score)
        return score

    def _work(self) -> None:
        if hasattr(os, "setpriority"):
            try:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
            except OSError:
                log.debug("the evaluation thread keeps its priority")
        while (item := self._waiting.get()) is not None:
            try:
                self._record(self._score(*item, self._images))
            except Exception:  # an unscored model must not end a run
                log.exception("the model of round %d could not be scored", item[0])

    def _score(self, round_id: int, theta: npt.NDArray[np.float32], images: int | None) -> Score:
        self._model.set_parameters(theta)
        found, loss = accuracy(self._model, self._dataset.test, self._dataset, images)
        count = len(self._dataset.test.labels)
        return Score(round_id, found, loss, count if images is None else min(images, count))
