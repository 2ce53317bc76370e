"""The whole audit: every setting in both worlds, and one verdict at one error probability."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from deploy.audit.canary import Canary
from deploy.audit.observation import observe
from deploy.audit.server import PRODUCT, Servers
from deploy.audit.setting import Claim, Setting
from ps.privacy.audit import AuditResult, Tally
from ps.privacy.residuals import Check, Residuals

__all__ = ["Audited", "Finding", "Trials", "audit", "judge", "play", "residuals_of", "settings_for"]

ALL_SIGNS_OF_FOUR = ("++++", "+-+-", "++--", "+--+")
"""Orthogonal, so that noise which any two of the four releases share is halved in two of them."""

RESIDUALS_SHARE = 0.1
"""Of α, for the checks of the residuals; the rest is for the bounds."""

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


@dataclass(frozen=True)
class Audited:
    """What an audit found: bounds from the canaries, and checks of the noise itself."""

    findings: Sequence[Finding]
    checks: Sequence[Check]

    @property
    def verdict(self) -> Literal["pass", "fail"]:
        """``fail`` if a bound exceeds the claim or a check fails."""
        failed = any(finding.result.verdict == "fail" for finding in self.findings)
        return "fail" if failed or any(check.verdict == "fail" for check in self.checks) else "pass"


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


def residuals_of(settings: Sequence[Setting], alpha: float) -> dict[int, Residuals]:
    """Where the residuals of all releases will go, by d; ``alpha`` for all checks."""
    planned: dict[int, int] = {}
    for setting in settings:
        planned[setting.num_parameters] = planned.get(setting.num_parameters, 0) + setting.releases
    return {d: Residuals(releases, d, alpha / len(planned)) for d, releases in planned.items()}


def play(setting: Setting, claim: Claim, servers: Servers, folder: Path, residuals: Residuals | None = None) -> Trials:
    """Both worlds of a setting; what is left of their releases without the aggregate goes to ``residuals``.

    Raises
    ------
    ByzULDPError
        See :func:`deploy.audit.observation.observe`.
    """
    statistics: dict[str, dict[int, npt.NDArray[np.float64]]] = {pattern: {} for pattern in setting.canary.patterns}
    for world in (1, -1):
        cells = observe(setting, claim, world, servers, folder, residuals)
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
) -> Audited:
    """Run everything, one after the other, in a temporary folder.

    Parameters
    ----------
    alpha
        The probability that any verdict is *fail* though the claim holds: :data:`RESIDUALS_SHARE` of it for the checks
        of the residuals of all releases, the rest shared out evenly among the bounds.
    entry
        The parameter server, ``module:function``.
    told
        Called with a setting before it runs.

    Raises
    ------
    ByzULDPError
        The audit could not be carried out. What it finds is returned, whatever it is.
    """
    residuals = residuals_of(settings, RESIDUALS_SHARE * alpha)
    share = (1 - RESIDUALS_SHARE) * alpha / sum(len(setting.canary.patterns) for setting in settings)
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="byzuldp-audit-") as scratch:
        folder = Path(scratch)
        with Servers(folder, entry) as servers:
            for setting in settings:
                told(setting)
                findings += judge(
                    setting, play(setting, claim, servers, folder, residuals[setting.num_parameters]), claim, share
                )
    return Audited(findings, tuple(check for each in residuals.values() for check in each.checks()))
