"""What the audit says: a table for people, JSON for programs, and what a verdict means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from deploy.audit.setting import Claim
from deploy.audit.suite import Audited, Finding
from ps.privacy.residuals import Check

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["COVERS", "DOES_NOT_COVER", "as_json", "as_table", "checks_table", "in_words", "weakest"]

COVERS = (
    "the trimmed mean's release mechanism, as seen in the models that a real parameter server publishes over gRPC: by "
    "canaries, the scale of its noise, the projection of momenta, and noise that rounds, coordinates, restarts, runs "
    "or forks share; and in the noise of all releases of this audit, its variance in every release and coordinate, "
    "bare values, the correlation of every two releases and of coordinates at every distance, values that come again "
    "in another order or with another sign, its distribution, and its mean in every coordinate, in every release, and "
    "in the direction of the canary"
)
DOES_NOT_COVER = (
    "side channels (timing, traffic, memory, logs), the bits of a float below the noise's grid, other rules, and the "
    "premises; noise that could be predicted but looks like new, or comes again only after more releases than an audit "
    "has, values that depend on each other without being equal and lie neither in one coordinate of two releases nor "
    "at one distance in one, dependence that takes three values to see, and faults too small for so few releases; and "
    "a pass is no proof: it says that these canaries and checks found nothing"
)
STOP = "Publish nothing more with this server until the cause is found"

LOOSE = 0.5
"""A setting that finds less than this much of what an attained claim would show has tested something weaker; and one
in which even that would show less than this much of the claim needs more trials."""


def in_words(audited: Audited, claim: Claim, alpha: float) -> str:
    """The verdict, in a sentence or two."""
    findings = audited.findings
    wrong = _wrong(audited.checks)
    failed = [finding for finding in findings if finding.result.verdict == "fail"]
    sure = f"with confidence {100 * (1 - alpha):.12g}%"
    if failed:
        worst = max(failed, key=lambda finding: finding.result.epsilon_lower)
        reasons = "; ".join(f"{finding.name} (would show {finding.setting.reveals})" for finding in failed)
        return (
            f"the claim epsilon = {claim.epsilon:g} at delta = {claim.delta:g} is false, {sure}: epsilon is at least "
            f"{worst.result.epsilon_lower:.3g} in {worst.name!r}. Failed: {reasons}. "
            f"{f'Besides, {wrong}. ' if wrong else ''}{STOP}"
        )
    if wrong:
        return f"{wrong}; {sure}. {STOP}"
    tight = max(finding.result.epsilon_lower for finding in findings) / claim.epsilon
    text = (
        f"no bound exceeds the claim, {sure}; the largest reaches {tight:.0%} of it; and the noise of all releases is "
        "what the ledger claims, in all that is checked"
    )
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
    if more := [check for check in audited.checks if check.verdict == "note"]:
        text += f". There is more noise than the ledger claims: {'; '.join(map(str, more))}"
    return text


def _wrong(checks: Sequence[Check]) -> str:
    """What the residuals refute, and by which checks; nothing if all pass."""
    parts = []
    for subject, told in (
        ("noise", "the noise is not what the ledger claims"),
        ("aggregate", "the aggregate is not the one expected"),
    ):
        if failed := [str(check) for check in checks if check.verdict == "fail" and check.subject == subject]:
            parts.append(f"{told}: {'; '.join(failed)}")
    return "; and ".join(parts)


def weakest(findings: Sequence[Finding]) -> list[Finding]:
    """Those that found far less than an attained claim would have shown."""
    return [finding for finding in findings if finding.result.epsilon_lower < LOOSE * finding.result.expected_epsilon]


def as_json(audited: Audited, claim: Claim, alpha: float) -> dict[str, Any]:
    """Plain values: the claim, one item for each setting and pattern and for each check, the verdict and its scope."""
    findings = audited.findings
    return {
        "verdict": audited.verdict,
        "claimed_epsilon": claim.epsilon,
        "delta": claim.delta,
        "mu": claim.mu,
        "alpha": alpha,
        "epsilon_lower": max(finding.result.epsilon_lower for finding in findings),
        "message": in_words(audited, claim, alpha),
        "settings": [_item(finding) for finding in findings],
        "residuals": [asdict(check) | {"verdict": check.verdict} for check in audited.checks],
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


def checks_table(checks: Sequence[Check]) -> Table:
    """One line for each check of the noise itself, at its furthest."""
    from rich.table import Table

    table = Table(
        title="the noise of all releases",
        caption="what is left of a release without its aggregate, in units of the noise charged for it;\n"
        "of so many tests the one furthest out",
    )
    table.add_column("check", no_wrap=True)
    for title in ("tests", "found", "limit"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("where")
    table.add_column("verdict")
    for check in checks:
        failed = check.verdict == "fail"
        table.add_row(
            check.name,
            f"{check.tested:,}",
            f"{check.statistic:.4g}",
            f"{'≤' if check.side == 'above' else '≥'} {check.threshold:.4g}",
            check.where,
            "FAIL" if failed else check.verdict,
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
