"""The whole audit: every setting in both worlds, and one verdict at one error probability."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deploy.audit.canary import Canary
from deploy.audit.observation import observe
from deploy.audit.server import PRODUCT, Servers
from deploy.audit.setting import Claim, Setting
from ps.privacy.audit import AuditResult, Tally

__all__ = ["Finding", "Trials", "audit", "judge", "play", "settings_for"]

ALL_SIGNS_OF_FOUR = ("++++", "+-+-", "++--", "+--+")
"""Orthogonal, so that noise which any two of the four releases share is halved in two of them."""

Trials = Mapping[str, Mapping[int, npt.NDArray[np.float64]]]
"""The statistics of a setting's trials, by pattern and world."""


@dataclass(frozen=True)
class Finding:
    """What one setting found with one pattern of signs."""

    setting: Setting
    pattern: str
    result: AuditResult

    @property
    def name(self) -> str:
        single = len(self.setting.canary.patterns) == 1
        return self.setting.name if single else f"{self.setting.name} {self.pattern.replace('-', '−')}"

    @property
    def trials(self) -> int:
        """Per world."""
        return self.setting.canary.trials(self.setting.shape)[self.pattern]


def settings_for(
    clients: int = 20, byzantine: int = 4, server_momentum: float = 0.9, *, full: bool = False
) -> tuple[Setting, ...]:
    """What the audit runs; ``full`` has the trials a direct bound needs, and a federation of (300, 15) besides."""
    one = Setting(
        "one release",
        "too little noise for the rule's sensitivity",
        Canary(),
        rounds=200 if full else 80,
        clients=clients,
        byzantine=byzantine,
        server_momentum=server_momentum,
    )
    pair, signs = Canary(("+-",), across="starts"), ("+-", "++")
    chosen = [
        one,
        replace(one, name="momentum inside", reveals="β counted twice, or not at all", rounds=8, form="inside"),
        replace(
            one, name="four releases", reveals="noise shared by rounds", canary=Canary(ALL_SIGNS_OF_FOUR), rounds=16
        ),
        replace(
            one,
            name="neighbours",
            reveals="noise shared by coordinates side by side",
            canary=Canary(signs, across="neighbours"),
            rounds=8,
        ),
        replace(
            one,
            name="halves",
            reveals="noise shared by coordinates far apart",
            canary=Canary(signs, across="halves"),
            rounds=8,
        ),
        replace(one, name="oversized", reveals="momenta that are not projected", rounds=8, oversize=4.0),
        replace(
            one,
            name="concentrated",
            reveals="a momentum that is large in few coordinates, and not projected",
            rounds=80,
            support=64,
            oversize=4.0,
        ),
        replace(
            one,
            name="killed and restarted",
            reveals="noise that comes again after a restart",
            canary=pair,
            rounds=4,
            starts="restarted",
        ),
        replace(
            one,
            name="two runs",
            reveals="noise that two runs share, or two processes forked from one",
            canary=pair,
            rounds=4,
            starts="two runs",
        ),
    ]
    if full:
        chosen.append(replace(one, name="300 clients, 15 Byzantine", rounds=40, clients=300, byzantine=15))
    return tuple(chosen)


def play(setting: Setting, claim: Claim, servers: Servers, folder: Path) -> Trials:
    """Both worlds of a setting.

    Raises
    ------
    ByzULDPError
        See :func:`deploy.audit.observation.observe`.
    """
    statistics: dict[str, dict[int, npt.NDArray[np.float64]]] = {pattern: {} for pattern in setting.canary.patterns}
    for world in (1, -1):
        cells = observe(setting, claim, world, servers, folder)
        for pattern, values in setting.canary.statistics(cells, setting.signs()).items():
            statistics[pattern][world] = values
    return statistics


def judge(setting: Setting, trials: Trials, claim: Claim, alpha: float) -> list[Finding]:
    """The bounds for each pattern of a setting; ``alpha`` for each of them."""
    findings = []
    for pattern, planned in setting.canary.trials(setting.shape).items():
        tally = Tally(claim.mu, claim.epsilon, claim.delta, planned, alpha)
        for world, values in trials[pattern].items():
            tally.add(world, values)
        findings.append(Finding(setting, pattern, tally.result()))
    return findings


def audit(
    settings: Sequence[Setting],
    claim: Claim,
    alpha: float,
    *,
    entry: str = PRODUCT,
    told: Callable[[Setting], None] = lambda _setting: None,
) -> list[Finding]:
    """Run everything, one after the other, in a temporary folder.

    Parameters
    ----------
    alpha
        The probability that any verdict is *fail* though the claim holds: shared out evenly.
    entry
        The parameter server, ``module:function``.
    told
        Called with a setting before it runs.

    Raises
    ------
    ByzULDPError
        The audit could not be carried out. What it finds is returned, whatever it is.
    """
    share = alpha / sum(len(setting.canary.patterns) for setting in settings)
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="byzuldp-audit-") as scratch:
        folder = Path(scratch)
        with Servers(folder, entry) as servers:
            for setting in settings:
                told(setting)
                findings += judge(setting, play(setting, claim, servers, folder), claim, share)
    return findings
