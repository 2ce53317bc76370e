"""What the audit says: a table for people, JSON for programs, and what a verdict means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deploy.audit.setting import Claim
from deploy.audit.suite import Finding

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["COVERS", "DOES_NOT_COVER", "as_json", "as_table", "in_words", "weakest"]

COVERS = (
    "the trimmed mean's release mechanism, as seen in the models that a real parameter server publishes over gRPC: the "
    "scale of its noise, the projection of momenta, and noise that rounds, coordinates, restarts, runs or forks share"
)
DOES_NOT_COVER = (
    "side channels (timing, traffic, memory, logs), the bits of a float below the noise's grid, other rules, and the "
    "premises; and a pass is no proof: it says that these canaries found nothing"
)
LOOSE = 0.5
"""A setting that finds less than this much of what an attained claim would show has tested something weaker; and one
in which even that would show less than this much of the claim needs more trials."""


def in_words(findings: Sequence[Finding], claim: Claim, alpha: float) -> str:
    """The verdict, in a sentence or two."""
    failed = [finding for finding in findings if finding.result.verdict == "fail"]
    sure = f"with confidence {100 * (1 - alpha):.12g}%"
    if failed:
        worst = max(failed, key=lambda finding: finding.result.epsilon_lower)
        reasons = "; ".join(f"{finding.name} (would show {finding.setting.reveals})" for finding in failed)
        return (
            f"the claim epsilon = {claim.epsilon:g} at delta = {claim.delta:g} is false, {sure}: epsilon is at least "
            f"{worst.result.epsilon_lower:.3g} in {worst.name!r}. Failed: {reasons}. Publish nothing more with this "
            "server until the cause is found"
        )
    tight = max(finding.result.epsilon_lower for finding in findings) / claim.epsilon
    text = f"no bound exceeds the claim, {sure}; the largest reaches {tight:.0%} of it"
    expected = max(finding.result.expected_epsilon for finding in findings) / claim.epsilon
    if expected < LOOSE:
        text += (
            f". Little can be said of so small an epsilon: with these trials {expected:.0%} is all that could be shown"
        )
    if loose := weakest(findings):
        names = ", ".join(repr(finding.name) for finding in loose)
        text += (
            f". In {names} the canary moved the releases less than it should, against their noise: more noise than "
            "claimed, or momenta that do not arrive; there the pass says little"
        )
    return text


def weakest(findings: Sequence[Finding]) -> list[Finding]:
    """Those that found far less than an attained claim would have shown."""
    return [finding for finding in findings if finding.result.epsilon_lower < LOOSE * finding.result.expected_epsilon]


def as_json(findings: Sequence[Finding], claim: Claim, alpha: float) -> dict[str, Any]:
    """Plain values: the claim, one item for each setting and pattern, the verdict and its scope."""
    failed = any(finding.result.verdict == "fail" for finding in findings)
    return {
        "verdict": "fail" if failed else "pass",
        "claimed_epsilon": claim.epsilon,
        "delta": claim.delta,
        "mu": claim.mu,
        "alpha": alpha,
        "epsilon_lower": max(finding.result.epsilon_lower for finding in findings),
        "message": in_words(findings, claim, alpha),
        "settings": [_item(finding) for finding in findings],
        "covers": COVERS,
        "does_not_cover": DOES_NOT_COVER,
    }


def as_table(findings: Sequence[Finding], claim: Claim) -> Table:
    """One line for each setting and pattern."""
    from rich.table import Table

    first = findings[0].setting
    table = Table(
        title=f"claimed everywhere: ε = {claim.epsilon:g}, δ = {claim.delta:g}\n"
        f"n = {first.clients}, f = {first.byzantine}, β = {first.server_momentum:g}",
        caption="T releases and so many trials in each of two worlds show that ε is at least:\n"
        "direct, whatever the noise is; curve, if the trade-off of the two errors is Gaussian",
    )
    table.add_column("setting", no_wrap=True)
    for title in ("T", "trials", "direct", "curve", "of claim"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict")
    for finding in findings:
        result, setting = finding.result, finding.setting
        failed = result.verdict == "fail"
        table.add_row(
            finding.name,
            str(setting.rounds_of_trial),
            f"{finding.trials:,}",
            f"{result.best('direct').epsilon:.3f}",
            f"{result.best('curve').epsilon:.3f}",
            f"{result.epsilon_lower / claim.epsilon:.0%}",
            "FAIL" if failed else "pass",
            style="bold red" if failed else None,
        )
    return table


def _item(finding: Finding) -> dict[str, Any]:
    result, setting = finding.result, finding.setting
    return {
        "name": finding.name,
        "reveals": setting.reveals,
        "clients": setting.clients,
        "byzantine": setting.byzantine,
        "server_momentum": setting.server_momentum,
        "rounds_of_trial": setting.rounds_of_trial,
        "trials_per_world": finding.trials,
        "alpha": result.alpha,
        "direct": result.best("direct").epsilon,
        "curve": result.best("curve").epsilon,
        "epsilon_lower": result.epsilon_lower,
        "expected": result.expected_epsilon,
        "verdict": result.verdict,
    }
