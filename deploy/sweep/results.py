"""What a run leaves in the table of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

__all__ = ["ERROR", "MEASURES", "Row", "measures_of"]

MEASURES: Mapping[str, str] = {
    "final_accuracy": "accuracy of the last model on the whole test set",
    "accuracy_last": "mean accuracy of the evaluations in the last evaluation.last rounds",
    "accuracy_max": "highest accuracy of all evaluations",
    "final_loss": "loss of the last model on the whole test set",
}
"""What can be chosen by, and drawn. Less of a loss is better."""

_OTHERS = (
    "accuracy_last_std",
    "rounds",
    "parameters",
    "private",
    "epsilon",
    "delta",
    "epsilon_spent",
    "calibration",
    "noise_multiplier",
)
COLUMNS = (*MEASURES, *_OTHERS)

ERROR = "error"
"""Status of a run that gave nothing; any other is a status of a run, ``failed`` (it diverged) included."""


@dataclass(frozen=True)
class Row:
    """One run's outcome.

    Attributes
    ----------
    key, values
        As in :class:`deploy.sweep.points.Point`.
    status
        ``completed``, ``failed`` and so on as in a summary; or :data:`ERROR`.
    results
        By name, as in :data:`COLUMNS`.
    error, exit_code
        What went wrong, in one text, and the code it would have ended a command with.
    attempts
        How often it was begun. Each of them may have released as many models as a whole run does.
    seconds
        Of the last attempt.
    """

    key: str
    values: Mapping[str, Any]
    status: str
    results: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    exit_code: int = 0
    attempts: int = 1
    seconds: float = 0.0

    @property
    def done(self) -> bool:
        """Whether there is nothing to run again."""
        return self.status != ERROR

    def tried(self, attempts: int) -> Row:
        """The same, of a run that was begun so often."""
        return replace(self, attempts=max(self.attempts, attempts))

    def as_json(self) -> dict[str, Any]:
        """JSON values; ``Row(**…)`` makes a row of them again."""
        return asdict(self)


def measures_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a run's summary."""
    last = summary.get("accuracy_last") or {}
    found = {name: summary.get(name) for name in COLUMNS}
    return found | {"accuracy_last": last.get("mean"), "accuracy_last_std": last.get("std")}
