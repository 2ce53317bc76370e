"""A plan as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from common.schedules import parse_schedule
from ps.privacy.plan import Plan

__all__ = ["text_of"]

_WIDTH = 100
_ROWS = 10


def text_of(plan: Plan, notes: Sequence[str] = ()) -> str:
    """Everything the plan knows, in sections; what is not known is left out."""
    sections = (_privacy(plan), _calibrations(plan), _mechanism(plan), _learning(plan), _by_round(plan))
    parts = ["\n".join([title, *lines]) for title, lines in sections if lines]
    parts += [
        textwrap.fill(f"warning: {sentence}", _WIDTH, break_on_hyphens=False) for sentence in (*plan.warnings, *notes)
    ]
    return "\n\n".join(parts)


def _privacy(plan: Plan) -> tuple[str, list[str]]:
    if plan.noise_multiplier == 0:
        return "privacy", [_line("ε", "infinite: no noise, no privacy")]
    return "privacy", _lines(
        ("ε", _number(plan.epsilon), _origin(plan, "epsilon")),
        ("δ", _number(plan.delta), _origin(plan, "delta")),
        ("rounds T", _whole(plan.rounds), _origin(plan, "rounds")),
        ("noise multiplier z", _number(plan.noise_multiplier), _origin(plan, "noise_multiplier")),
        ("rounds that fit", _whole(plan.rounds_that_fit), "at this z, within (ε, δ)"),
    )


def _calibrations(plan: Plan) -> tuple[str, list[str]]:
    rows = [
        (name, z, eps)
        for name, z, eps in (
            ("exact", plan.noise_multiplier_exact, plan.epsilon_exact),
            ("renyi", plan.noise_multiplier_renyi, plan.epsilon_renyi),
            ("closed form", plan.noise_multiplier_sufficient, None),
        )
        if z is not None or eps is not None
    ]
    if not rows or plan.noise_multiplier == 0:
        return "", []
    lines = [f"  {'':<24}{'z for this ε':<16}ε of this z"]
    for name, z, eps in rows:
        used = "  used" if name == plan.calibration else ""
        lines.append(f"  {name:<24}{_number(z) or '-':<16}{_number(eps) or '-':<16}{used}".rstrip())
    if plan.sufficient_refused is not None:
        lines += textwrap.wrap(
            f"closed form: {plan.sufficient_refused}", _WIDTH, initial_indent="  ", subsequent_indent="    "
        )
    return "calibrations", lines


def _mechanism(plan: Plan) -> tuple[str, list[str]]:
    if plan.clients is None:
        return "", []
    byzantine = f"{plan.byzantine}" + (f" ({plan.byzantine_share})" if plan.byzantine_share else "")
    clip_norm = "none" if plan.clip_norm is None else _number(plan.clip_norm)
    form = f"{plan.server_momentum_form} the rule"
    other = "strict" if plan.premise == "independent" else "independent"
    return "mechanism", _lines(
        ("rule", plan.rule, ""),
        ("clients n, Byzantine f", f"{plan.clients}, {byzantine}", _origin(plan, "byzantine")),
        ("clip norm C", clip_norm, _origin(plan, "clip_norm")),
        ("server momentum β", _schedule(plan.server_momentum), f"{form}{_comma(_origin(plan, 'server_momentum'))}"),
        ("sensitivity S", _number(plan.sensitivity), f"premise: {plan.premise}"),
        ("", _number(getattr(plan, f"sensitivity_{other}")), f"premise: {other}"),
        ("σ per coordinate", _number(plan.sigma), "z·S"),
    )


def _learning(plan: Plan) -> tuple[str, list[str]]:
    share = plan.byzantine_share or f"{plan.byzantine}"
    needed = _whole(plan.clients_needed)
    if plan.clients_needed is None and plan.parameters is not None and plan.noise_multiplier != 0:
        needed = "no number is enough"
    return "signal and noise", _lines(
        ("parameters d", _whole(plan.parameters), ""),
        ("in one round", _pair(plan.signal_norm, plan.noise_norm), "largest signal; noise, σ√d"),
        (
            "in all rounds",
            _pair(plan.signal_displacement, plan.noise_displacement),
            f"η = {_schedule(plan.learning_rate)}{_comma(_origin(plan, 'learning_rate'))}",
        ),
        ("signal-to-noise ratio", _number(plan.signal_to_noise), ""),
        ("clients needed", needed, f"for a ratio of {plan.signal_to_noise_wanted:g}, {share} of them Byzantine"),
    )


def _by_round(plan: Plan) -> tuple[str, list[str]]:
    rows = plan.epsilon_by_round(_ROWS)
    if not rows or plan.noise_multiplier == 0:
        return "", []
    lines = [f"  {'rounds':<24}{'exact':<16}{'renyi':<16}".rstrip()]
    lines += [f"  {t:<24}{_number(exact) or '∞':<16}{_number(renyi) or '∞':<16}".rstrip() for t, exact, renyi in rows]
    return f"ε after so many rounds (δ = {_number(plan.delta)})", lines


def _lines(*entries: tuple[str, str, str]) -> list[str]:
    return [_line(name, value, remark) for name, value, remark in entries if value]


def _line(name: str, value: str, remark: str = "") -> str:
    return f"  {name:<24}{value:<16}{'  ' + remark if remark else ''}".rstrip()


def _origin(plan: Plan, name: str) -> str:
    if name in plan.derived:
        return "derived"
    return "default" if name in plan.assumed else ""


def _comma(text: str) -> str:
    return f", {text}" if text else ""


def _pair(signal: float | None, noise: float | None) -> str:
    return "" if signal is None or noise is None else f"{_number(signal)}; {_number(noise)}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _whole(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _schedule(given: Any) -> str:
    schedule = parse_schedule(given)
    return f"{schedule(0):g}" if schedule.kind == "constant" else f"{schedule(0):g}, then a schedule"
