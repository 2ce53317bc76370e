"""Put what was measured of attacks and misbehaviours into docs/adversaries.md, between its markers.

    python benchmarks/adversary_tables.py

Reads benchmarks/results/attacks.csv and misbehaviour.json, and the registries for what each does, knows and is from.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from attacks import CSV, EVERY_RULE_ON, MAIN_RULES, OTHER_RULES, PARTITIONS, SEEDS, VARIANTS, cell, short, stored

from adversary.attacks import ATTACKS
from adversary.misbehaviour import MISBEHAVIOURS
from deploy.listing import items_of

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "adversaries.md"
MISBEHAVIOUR = HERE / "results" / "misbehaviour.json"
MIB = 1 << 20


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def attacks() -> str:
    """What each attack does, knows and is from, and the accuracy that is left."""
    rows, known = stored(CSV), {item.name: item for item in items_of("attacks")}
    columns = ["attack", "what it sends", "what it needs", "source"]
    columns += [f"{partition}: {short(rule)}" for partition in PARTITIONS for rule in MAIN_RULES]
    lines = []
    for variant, configured in VARIANTS.items():
        item = known[configured["name"]]
        plain = variant == configured["name"]
        told = [item.about, ATTACKS[item.name].needs, item.facts["source"] or "–"] if plain else ["", "", ""]
        cells = [cell(rows, variant, partition, rule, SEEDS) for partition in PARTITIONS for rule in MAIN_RULES]
        lines.append([_named(variant), *told, *cells])
    return table(columns, sorted(lines, key=lambda line: (line[0] != "`none`", line[0])))


def rules() -> str:
    """Which attack breaks which rule."""
    rows, every = stored(CSV), (*MAIN_RULES, *OTHER_RULES)
    lines = [[_named(name), *(cell(rows, name, EVERY_RULE_ON, rule, SEEDS[:1]) for rule in every)] for name in VARIANTS]
    return table(["attack", *map(short, every)], sorted(lines, key=lambda line: (line[0] != "`none`", line[0])))


def misbehaviours() -> str:
    """What each misbehaviour costs."""
    measured = {row["name"]: row for row in json.loads(MISBEHAVIOUR.read_text(encoding="utf-8"))}
    columns = ["misbehaviour", "core used by it", "latency against the control", "memory of the PS", "refused"]
    return table(columns, [[f"`{name}`", *_cost(measured[name])] for name in sorted(MISBEHAVIOURS)])


def _cost(row: Mapping[str, Any]) -> list[str]:
    runs, controls = row["runs"], row["controls"]

    def typical(every: Sequence[Mapping[str, Any]]) -> float:
        return median(latency for one in every for latency in one["latencies_s"])

    kinds: dict[str, int] = {}
    for counts in runs[-1]["refused"].values():
        for kind, count in counts.items():
            kinds[kind] = kinds.get(kind, 0) + count
    return [
        f"{sum(one['burnt'] for one in runs) / len(runs):.2f}",
        f"{typical(runs) / typical(controls):.2f}×",
        f"{max(one['grown'] for one in runs) / MIB:.0f} of {runs[0]['allowed'] / MIB:.0f} MiB",
        ", ".join(f"`{kind}` {count:,}" for kind, count in sorted(kinds.items())) or "–",
    ]


def _named(variant: str) -> str:
    name, comma, how = variant.partition(", ")
    return f"`{name}`{comma}{how}"


def filled(page: str, contents: Mapping[str, str]) -> str:
    """The page with what stands between its markers replaced."""
    for name, content in contents.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(page):
            raise SystemExit(f"{PAGE} has no markers for {name}")
        page = pattern.sub(lambda match, content=content: f"{match[1]}{content}\n{match[2]}", page)
    return page


if __name__ == "__main__":
    parts = {"attacks": attacks(), "rules": rules(), "misbehaviours": misbehaviours()}
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), parts), encoding="utf-8")
