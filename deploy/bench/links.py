"""What the clients' links are like: those of the fault lab, in one state from beginning to end."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.errors import ConfigError
from deploy.chaos.backend import Conditions

__all__ = ["Links", "links_of"]

LOOPBACK = "loopback"


@dataclass(frozen=True)
class Links:
    """Every client process has a link of its own, the same in both directions.

    Attributes
    ----------
    backend
        Of the fault lab, or ``auto``; None: nothing stands between the processes but loopback.
    """

    conditions: Conditions
    backend: str | None

    def __str__(self) -> str:
        if self.backend is None:
            return LOOPBACK
        words = []
        if self.conditions.delay_s or self.conditions.jitter_s:
            jitter = f" ± {1e3 * self.conditions.jitter_s:g}" if self.conditions.jitter_s else ""
            words.append(f"{1e3 * self.conditions.delay_s:g}{jitter} ms each way")
        if self.conditions.rate_bytes_s is not None:
            words.append(f"{8e-6 * self.conditions.rate_bytes_s:g} Mbit/s each way")
        if self.conditions.loss:
            words.append(f"{self.conditions.loss:.2%} of the packets lost")
        return ", ".join(words) or "clear links of the fault lab"


def links_of(*, delay_ms: float, jitter_ms: float, rate_mbit: float | None, loss: float, backend: str | None) -> Links:
    """What was asked for on the command line.

    Raises
    ------
    ConfigError
        A number is out of range.
    """
    for option, value in (("--delay-ms", delay_ms), ("--jitter-ms", jitter_ms)):
        if not 0.0 <= value <= 60_000.0:
            raise ConfigError(f"{option} {value:g}: expected 0 to 60000 milliseconds")
    if rate_mbit is not None and not 0.0 < rate_mbit < math.inf:
        raise ConfigError(f"--rate-mbit {rate_mbit:g}: expected a positive number of megabits a second")
    if not 0.0 <= loss < 1.0:
        raise ConfigError(f"--loss {loss:g}: expected a fraction from 0 to below 1, for instance 0.01")
    rate = None if rate_mbit is None else rate_mbit * 1e6 / 8
    conditions = Conditions(delay_s=delay_ms / 1e3, jitter_s=jitter_ms / 1e3, rate_bytes_s=rate, loss=loss)
    if not conditions.needs() and backend in (None, LOOPBACK):
        return Links(conditions, None)
    if backend == LOOPBACK:
        raise ConfigError("--backend loopback has no links to disturb: leave it out, or use auto, proxy, netns, netem")
    return Links(conditions, backend or "auto")
