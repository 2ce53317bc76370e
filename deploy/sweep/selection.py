"""The best over a part of the grid, as papers choose a learning rate; and what is said beside it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from deploy.sweep.plan import Plan
from deploy.sweep.points import Point, shown
from deploy.sweep.results import Row
from deploy.sweep.spending import Spent, spent_on

__all__ = ["Best", "best_of", "group_by", "summary_text"]

LOWER_IS_BETTER = ("final_loss",)


@dataclass(frozen=True)
class Best:
    """For one combination of what is not chosen: the choice, how well it does, and what choosing cost.

    Attributes
    ----------
    fixed, chosen
        Values by key.
    mean, std
        Over the seeds of the choice; std is None for one seed.
    seeds, candidates
        Runs behind the mean; choices that were compared.
    epsilon
        Of each single run; None without privacy, or where the runs differ.
    search
        Of all the runs that were compared, together.
    """

    fixed: Mapping[str, Any]
    chosen: Mapping[str, Any]
    mean: float
    std: float | None
    seeds: int
    candidates: int
    epsilon: float | None
    search: Spent


Runs = list[tuple[Point, Row]]


def group_by(runs: Sequence[tuple[Point, Row]], keys: Sequence[str]) -> dict[tuple[str, ...], Runs]:
    """The runs by their values of some keys, in the order of the grid."""
    groups: dict[tuple[str, ...], Runs] = {}
    for point, row in runs:
        groups.setdefault(tuple(shown(point.values[key]) for key in keys), []).append((point, row))
    return groups


def best_of(plan: Plan, rows: Mapping[str, Row]) -> list[Best]:
    """The choices of ``[select]``; a choice whose every seed failed does not count, one that lacks seeds does."""
    assert plan.select is not None  # noqa: S101 - asked for
    select, found = plan.select, []
    tried = [(point, row) for point in plan.points if (row := rows.get(point.key)) is not None]
    others = [key for key in plan.keys if key not in (*select.over, *plan.seeds)]
    for runs in group_by(tried, others).values():
        scored = []
        for candidates in group_by(runs, select.over).values():
            values = [value for _, row in candidates if (value := row.results.get(select.by)) is not None]
            if values:
                scored.append((fmean(values), values, candidates))
        if not scored:
            continue
        # The first of equals, in the order of the grid.
        pick = min if select.by in LOWER_IS_BETTER else max
        mean, values, candidates = pick(scored, key=lambda item: item[0])
        first = candidates[0][0]
        epsilons = {point.experiment.privacy.epsilon for point, _ in candidates}
        found.append(
            Best(
                fixed={key: first.values[key] for key in others},
                chosen={key: first.values[key] for key in select.over},
                mean=mean,
                std=stdev(values) if len(values) > 1 else None,
                seeds=len(values),
                candidates=len(scored),
                epsilon=epsilons.pop() if len(epsilons) == 1 else None,
                search=spent_on(runs),
            )
        )
    return found


def summary_text(plan: Plan, rows: Mapping[str, Row]) -> str:
    """``summary.md``: the choices, and what ε means here."""
    tried = [(point, row) for point in plan.points if (row := rows.get(point.key)) is not None]
    failed = [(point, row) for point, row in tried if not row.done]
    lines = [
        f"# Sweep {plan.name}",
        "",
        f"{len(tried)} of {len(plan.points)} runs; {len(failed)} of them gave nothing.",
        "",
        *_privacy(tried),
    ]
    if plan.select is not None and tried:
        lines += ["", *_choices(plan, best_of(plan, rows))]
    if failed:
        lines += ["", "## Runs without a result", "", "| run | exit code | error |", "| --- | --- | --- |"]
        lines += [f"| {point.name} | {row.exit_code} | {_inline(row.error)} |" for point, row in failed]
    return "\n".join(lines) + "\n"


def _privacy(tried: Runs) -> list[str]:
    if all(point.experiment.privacy.epsilon is None for point, _ in tried):
        return ["No run was asked to be private."]
    text = (
        "ε in the tables is that of each single run. All the runs of this sweep together, on the same people, would "
        f"cost {spent_on(tried).words()}: whoever chooses by these results, on data to be protected, has spent that."
    )
    return [text]


def _choices(plan: Plan, found: Sequence[Best]) -> list[str]:
    assert plan.select is not None  # noqa: S101 - asked for
    over, by = plan.select.over, plan.select.by
    fixed = list(found[0].fixed) if found else []
    head = [*fixed, *(f"best {key}" for key in over), by, "seeds", "choices", "ε per run", "ε of the search"]
    lines = [
        f"## Best {', '.join(over)}, by {by}",
        "",
        "Mean over seeds ± standard deviation.",
        "",
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
    ]
    for item in found:
        cells = [
            *(_inline(shown(value)) for value in itertools.chain(item.fixed.values(), item.chosen.values())),
            f"{item.mean:.4f}" + ("" if item.std is None else f" ± {item.std:.4f}"),
            str(item.seeds),
            str(item.candidates),
            "none" if item.epsilon is None else f"{item.epsilon:.4g}",
            item.search.words(),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _inline(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
