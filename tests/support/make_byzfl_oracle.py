"""Writes tests/unit/byzfl_oracle.json: what ByzFL 0.0.11 returns, in float64, where its definitions are ours.

Run in an environment of its own, where byzfl and numpy are installed:

    python tests/support/make_byzfl_oracle.py

Left out: CAF, whose loop need not end and which takes one power step from a random start; Bucketing, which draws from
a global generator; MDA where several sets have the smallest diameter and ByzFL takes the first by index.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np

SETTINGS = [(5, 1, 3), (7, 2, 4), (8, 3, 2), (9, 1, 6), (11, 5, 3), (12, 2, 1), (13, 3, 5), (6, 0, 3)]


def inputs(n: int, f: int, d: int) -> np.ndarray:
    """Multiples of 1/64, so that they are the same in float32; f of them shifted."""
    rng = np.random.default_rng([n, f, d])
    x = np.round(rng.standard_normal((n, d)) * 64) / 64
    x[rng.permutation(n)[:f]] += 4.0
    return x


def has_one_smallest_set(x: np.ndarray, f: int) -> bool:
    distances = np.linalg.norm(x[:, None] - x[None], axis=2)
    sets = itertools.combinations(range(len(x)), len(x) - f)
    diameters = sorted(distances[np.ix_(chosen, chosen)].max() for chosen in sets)
    return len(diameters) == 1 or diameters[1] > diameters[0]


def case(n: int, f: int, d: int) -> dict[str, object]:
    import byzfl

    x = inputs(n, f, d)
    found = {
        "trimmed_mean": byzfl.TrMean(f)(x),
        "median": byzfl.Median()(x),
        "geometric_median": byzfl.GeometricMedian(nu=0.1, T=3)(x),
        "krum": byzfl.Krum(f)(x),
        "multi_krum": byzfl.MultiKrum(f)(x),
        "centered_clipping": byzfl.CenteredClipping(L=3, tau=1.5)(x),
        "meamed": byzfl.Meamed(f)(x),
        "nearest_neighbor_mixing": byzfl.NNM(f)(x),
        "clipping": byzfl.Clipping(2.0)(x.copy()),
        "adaptive_clipping": byzfl.ARC(f)(x.copy()),
    }
    if has_one_smallest_set(x, f):
        found["mda"] = byzfl.MDA(f)(x)
    return {"f": f, "x": x.tolist(), **{name: np.asarray(value).tolist() for name, value in found.items()}}


if __name__ == "__main__":
    target = Path(__file__).parents[1] / "unit" / "byzfl_oracle.json"
    cases = [json.dumps(case(*setting)) for setting in SETTINGS]
    target.write_text('{"byzfl": "0.0.11", "cases": [\n' + ",\n".join(cases) + "\n]}\n")
