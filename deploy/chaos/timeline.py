"""The timeline of a run, sans-I/O: which faults begin and end now, given the time and the rounds that are done.

It reads no clock and does nothing: the conductor asks it what is due, and writes into it what became of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.chaos.faults import Fault
from deploy.chaos.moments import Moment

__all__ = ["Occurrence", "Timeline"]


@dataclass(eq=False)
class Occurrence:
    """One fault at one of its moments, and what became of it.

    Attributes
    ----------
    began_s, ended_s
        Seconds after the first round; negative before it. None: not yet.
    began_round, ended_round
        Rounds done by then.
    notes
        What is to be known about how it was done, or why it was not.
    """

    fault: Fault
    at: Moment
    began_s: float | None = None
    began_round: int = 0
    ended_s: float | None = None
    ended_round: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether it has begun and not ended."""
        return self.began_s is not None and self.ended_s is None

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def as_json(self) -> dict[str, Any]:
        fault = self.fault
        return {
            "do": fault.do,
            "on": list(fault.on),
            "detail": fault.detail(),
            "at": str(self.at),
            "for": None if fault.lasting is None else str(fault.lasting),
            "began_s": self.began_s,
            "began_round": self.began_round if self.began_s is not None else None,
            "ended_s": self.ended_s,
            "ended_round": self.ended_round if self.ended_s is not None else None,
            "notes": list(self.notes),
        }


class Timeline:
    """All that is to happen in one run.

    Parameters
    ----------
    faults
        Each occurs at every one of its moments.
    """

    def __init__(self, faults: Iterable[Fault]) -> None:
        found = [Occurrence(fault, at) for fault in faults for at in fault.at]
        self.occurrences: Sequence[Occurrence] = sorted(found, key=_order)

    def due(self, now_s: float | None, rounds: int) -> tuple[list[Occurrence], list[Occurrence]]:
        """What ends now, and what begins now; each is returned once.

        Ends come before beginnings, so that a fault that follows another at once finds the network as it should.

        Parameters
        ----------
        now_s
            Seconds since the first round was done; None before, when only what is at the start begins.
        rounds
            Rounds done.
        """
        seconds = -1.0 if now_s is None else now_s
        over = [item for item in self.occurrences if item.holds and self._is_over(item, now_s, rounds)]
        new = [item for item in self.occurrences if item.began_s is None and _is_due(item.at, now_s, rounds)]
        for item in over:
            item.ended_s, item.ended_round = seconds, rounds
        for item in new:
            item.began_s, item.began_round = seconds, rounds
            if item.fault.momentary:
                item.ended_s, item.ended_round = seconds, rounds
        return over, new

    def next_s(self, now_s: float | None) -> float | None:
        """Seconds until something is due if no round is done meanwhile; None: never."""
        if now_s is None:
            return None
        times = [item.at.value for item in self.occurrences if item.began_s is None and item.at.unit == "s"]
        times += [end for item in self.occurrences if item.holds and (end := _end_s(item)) is not None]
        return max(0.0, min(times) - now_s) if times else None

    @property
    def holding(self) -> list[Occurrence]:
        """What holds now, in the order in which it began."""
        held = [item for item in self.occurrences if item.holds]
        return sorted(held, key=lambda item: (item.began_s or 0.0, item.began_round))

    @property
    def missed(self) -> list[Occurrence]:
        """What has not begun."""
        return [item for item in self.occurrences if item.began_s is None]

    @staticmethod
    def _is_over(item: Occurrence, now_s: float | None, rounds: int) -> bool:
        lasting = item.fault.lasting
        if lasting is None:
            return False
        if lasting.unit == "rounds":
            return rounds - item.began_round >= lasting.value
        end = _end_s(item)
        return now_s is not None and end is not None and now_s >= end


def _end_s(item: Occurrence) -> float | None:
    lasting = item.fault.lasting
    if lasting is None or lasting.unit != "s" or item.began_s is None:
        return None
    return max(0.0, item.began_s) + lasting.value  # seconds count from the first round on


def _is_due(at: Moment, now_s: float | None, rounds: int) -> bool:
    match at.unit:
        case "round":
            return rounds >= at.value
        case "s":
            return now_s is not None and now_s >= at.value
    return True


def _order(item: Occurrence) -> tuple[int, float]:
    return ("start", "round", "s").index(item.at.unit), item.at.value
