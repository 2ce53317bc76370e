"""How fast the rules are: the trimmed mean against memory, ByzFL, Flower and torch.sort; the others against ByzFL.

    make bench-aggregation

Fixed: float32, rows of standard normals, medians over at least three repetitions in which all candidates of a line
take turns. Varied: n, f and d. Writes ``benchmarks/results/aggregation.md``.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers import PEERS, inside

if __name__ == "__main__":
    inside()

import numpy as np
import torch
from gpu_check import throughput_table
from timing import facts, interleaved, milliseconds
from torch import Tensor

from common.aggregation import BEFORE, RULES, RoundContext, make_rule
from common.aggregation.kernels.library import Unavailable, load_library

RESULT = Path(__file__).resolve().parent / "results" / "aggregation.md"
SMALL = 100_000  # columns; below, torch is timed on one thread too, and its better time counts


@dataclass(frozen=True)
class Shape:
    """n, f, d and the targets: at most so many times the time to read, at least so many times faster than …"""

    n: int
    f: int
    d: int
    over_read: float | None = None
    byzfl: float | None = None
    flower: float | None = None
    sort: float | None = None


SHAPES = (
    Shape(20, 4, 1_000_000, over_read=2.0, byzfl=70, flower=100),
    Shape(20, 4, 10_000_000, over_read=2.6, byzfl=50, flower=90),
    Shape(100, 20, 1_000_000, over_read=20, byzfl=20, flower=25),
    Shape(100, 20, 26_010, over_read=10, byzfl=25, flower=25),
    Shape(300, 15, 26_010, sort=8),
    Shape(1000, 50, 26_010, sort=5),
)

READER = """
#include <cstddef>
#include <thread>
#include <vector>
typedef float V __attribute__((vector_size(32)));
typedef float U __attribute__((vector_size(32), aligned(4)));
static float part(const float* x, ptrdiff_t from, ptrdiff_t to) {
  V a{}, b{}, c{}, d{};
  for (ptrdiff_t i = from; i + 32 <= to; i += 32) {
    a += *(const U*)(x + i); b += *(const U*)(x + i + 8); c += *(const U*)(x + i + 16); d += *(const U*)(x + i + 24);
  }
  a += b + c + d;
  return a[0] + a[1] + a[2] + a[3] + a[4] + a[5] + a[6] + a[7];
}
extern "C" float read_all(const float* x, ptrdiff_t size, int threads) {
  std::vector<float> sums(threads * 16);
  std::vector<std::thread> others;
  for (int t = 1; t < threads; t++)
    others.emplace_back([=, &sums] { sums[16 * t] = part(x, size / threads * t, size / threads * (t + 1)); });
  sums[0] = part(x, 0, size / threads);
  for (auto& other : others) other.join();
  float total = 0;
  for (int t = 0; t < threads; t++) total += sums[16 * t];
  return total;
}
"""


def readers(x: Tensor, threads: int) -> dict[str, Callable[[], object]]:
    """Ways to read every element once; the fastest is what memory allows."""
    ways: dict[str, Callable[[], object]] = {"read torch": x.sum, "read torch 1": on_threads(1, x.sum)}
    try:
        function = load_library(READER, optimisation="-O2").read_all
    except Unavailable:
        return ways
    function.restype = ctypes.c_float
    arguments = ctypes.c_void_p(x.data_ptr()), ctypes.c_ssize_t(x.numel())
    ways["read C++"] = lambda: function(*arguments, threads)
    ways["read C++ 1"] = lambda: function(*arguments, 1)
    return ways


def on_threads(threads: int, function: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return function()
        finally:
            torch.set_num_threads(before)

    return run


def trimmed_mean_line(shape: Shape, repetitions: int) -> str:
    from byzfl import TrMean
    from flwr.server.strategy.aggregate import aggregate_trimmed_avg

    n, f, d = shape.n, shape.f, shape.d
    x = torch.from_numpy(np.random.default_rng(n).standard_normal((n, d), dtype=np.float32))
    rule, threads = make_rule("trimmed_mean", num_byzantine=f), torch.get_num_threads()
    rule.prepare(n, d, "cpu")
    theirs = TrMean(f)
    messages, cut = [([row], 1) for row in x.numpy()], (f + 0.5) / n
    functions: dict[str, Callable[[], object]] = {
        "ours": lambda: rule(x),
        "byzfl": lambda: theirs(x),
        "flower": lambda: aggregate_trimmed_avg(messages, cut),
        "sort": lambda: x.sort(dim=0),
        **readers(x, threads),
    }
    if d < SMALL:
        for name in ("byzfl", "sort"):
            functions[f"{name} 1"] = on_threads(1, functions[name])
    reference = x.numpy().astype(np.float64) if d <= 2_000_000 else None
    error = ""
    if reference is not None:
        reference.sort(axis=0)
        wanted = reference[f : n - f].mean(axis=0)
        scale = float(np.abs(reference).max())
        error = f"{float(np.abs(rule(x).numpy() - wanted).max()) / scale:.1e}"
        assert np.abs(theirs(x).numpy() - wanted).max() < 1e-4 * scale
        assert np.abs(aggregate_trimmed_avg(messages, cut)[0] - wanted).max() < 1e-4 * scale
        del reference
    medians = interleaved(functions, repetitions)
    best = {
        name: min(value for key, value in medians.items() if key.split()[0] == name)
        for name in ("ours", "read", "byzfl", "flower", "sort")
    }
    ratios = [
        against(best["ours"] / best["read"], shape.over_read, at_most=True),
        against(best["byzfl"] / best["ours"], shape.byzfl),
        against(best["flower"] / best["ours"], shape.flower),
        against(best["sort"] / best["ours"], shape.sort),
    ]
    times = [milliseconds(best[name]) for name in ("read", "ours")]
    return row(f"{n}, {f}, {d:,}", *times, *ratios, error)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def against(ratio: float, target: float | None, at_most: bool = False) -> str:
    text = f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.0f}×"
    if target is None:
        return text
    met = ratio <= target if at_most else ratio >= target
    return f"{text} ({'≤' if at_most else '≥'} {target:g}{'' if met else ', **missed**'})"


def peers_of(f: int) -> dict[str, Callable[[Tensor], object]]:
    """ByzFL's answer to a rule or a step of ours, by our name."""
    import byzfl

    average = byzfl.Average()

    steps = {
        "nearest_neighbor_mixing": byzfl.NNM(f),
        "bucketing": byzfl.Bucketing(2),
        "clipping": byzfl.Clipping(2.0),
        "adaptive_clipping": byzfl.ARC(f),
    }

    def after(step: Callable[[Tensor], Tensor]) -> Callable[[Tensor], object]:
        return lambda x: average(step(x))

    return {
        "mean": average,
        "trimmed_mean": byzfl.TrMean(f),
        "median": byzfl.Median(),
        "geometric_median": byzfl.GeometricMedian(nu=0.1, T=3),
        "geometric_median, smoothed": byzfl.GeometricMedian(nu=0.1, T=3),
        "krum": byzfl.Krum(f),
        "multi_krum": byzfl.MultiKrum(f),
        "centered_clipping": byzfl.CenteredClipping(L=1, tau=10.0),
        "meamed": byzfl.Meamed(f),
        "mda": byzfl.MDA(f),
        "covariance_filter": byzfl.CAF(f),
        **{name: after(step) for name, step in steps.items()},
        **{f"{name}, alone": step for name, step in steps.items()},
    }


def rule_lines(n: int, f: int, d: int, repetitions: int) -> list[str]:
    """Every rule, every step before the mean, and the steps alone, beside ByzFL's, and the mean."""
    x = torch.from_numpy(np.random.default_rng(n).standard_normal((n, d), dtype=np.float32))
    context = RoundContext(
        weights=torch.full((n,), 1.0 / n, dtype=torch.float64),
        centre=torch.zeros(d),
        generator=np.random.default_rng(0),
    )
    rules = {name: (name, {}) for name in RULES}
    rules["geometric_median, smoothed"] = ("geometric_median", {"smoothing": 0.1, "iterations": 3})
    steps: dict[str, dict[str, Any]] = {"bucketing": {"size": 2}, "clipping": {"radius": 2.0}}
    rules |= {name: ("mean", {"before": [{"name": name, **steps.get(name, {})}]}) for name in BEFORE}
    theirs, lines = peers_of(f), []
    mean = make_rule("mean", num_byzantine=f)
    timed: dict[str, Callable[[], object]] = {}
    for label, (name, parameters) in rules.items():
        try:
            rule = make_rule(name, num_byzantine=f, **parameters)
            rule.prepare(n, d, "cpu")
            rule(x, context)
        except Exception as error:  # a rule that cannot run here is a line of the table, not the end of it
            lines.append(f"| {label} | {type(error).__name__}: {error} | | | |")
            continue
        timed[label] = partial(rule, x, context)
    for name in BEFORE:
        step = BEFORE[name](num_byzantine=f, **steps.get(name, {}))
        timed[f"{name}, alone"] = partial(step, x, context)
    for label, ours in timed.items():
        functions: dict[str, Callable[[], object]] = {"ours": ours, "mean": partial(mean, x)}
        overwrites = label in theirs and add_peer(functions, theirs[label], x)
        medians = interleaved(functions, repetitions)
        over_mean = against(
            medians["ours"] / medians["mean"], 2.0 if label == "normalized_mean" else None, at_most=True
        )
        their, ratio = "has none", ""
        if label in theirs:
            their, ratio = milliseconds(medians["byzfl"]), against(medians["byzfl"] / medians["ours"], 1.0)
        lines.append(f"| {label} | {milliseconds(medians['ours'])} | {their} | {ratio} | {over_mean} |")
        if overwrites:
            alone = medians["byzfl"] - medians["copy"]
            lines[-1] += (
                f"\n| … without the copy | | {milliseconds(alone)} | {against(alone / medians['ours'], 1.0)} | |"
            )
        print(lines[-1], flush=True)
    return lines


def add_peer(functions: dict[str, Callable[[], object]], peer: Callable[[Tensor], object], x: Tensor) -> bool:
    """Add ByzFL's function; tell whether it overwrites its argument, in which case it is given a copy of ``x``.

    Otherwise it would, from the second call on, and we with it, be timed on rows that are clipped already. The copy
    goes into a buffer that is there before, and is timed apart too.
    """
    buffer = x.clone()
    peer(buffer)
    if torch.equal(buffer, x):
        functions["byzfl"] = partial(peer, x)
        return False
    functions["byzfl"] = lambda: peer(buffer.copy_(x))
    functions["copy"] = lambda: buffer.copy_(x)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--quick", action="store_true", help="a hundredth of the columns: to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    loads = [os.getloadavg()[0]]

    def columns(d: int) -> int:
        return d // 100 if options.quick else d

    columns_of_table = ("n, f, d", "read once, ms", "ours, ms", "ours over reading", "ByzFL over ours")
    table = [row(*columns_of_table, "Flower over ours", "torch.sort over ours", "error"), "|" + "---|" * 8]
    for shape in SHAPES:
        shape = Shape(**{**vars(shape), "d": columns(shape.d)})
        table.append(trimmed_mean_line(shape, options.repetitions))
        print(table[-1], flush=True)
    rules = rule_lines(20, 4, columns(1_000_000), options.repetitions)
    loads.append(os.getloadavg()[0])
    lines_of_table, lines_of_rules = "\n".join(table), "\n".join(rules)
    facts_list = "\n".join(f"- {name}: {fact}" for name, fact in facts().items())
    text = f"""\
# Aggregation

`make bench-aggregation`, against {" and ".join(PEERS)}. float32, medians of {options.repetitions} repetitions in which
all candidates of a line take turns. Ratios travel; milliseconds do not.

{facts_list}
- load average before and after: {loads[0]:.1f}, {loads[1]:.1f} (the benchmark's own load is about 1 to 2)

## The coordinate-wise trimmed mean

Reading once is the fastest of torch.sum and a C++ loop, on one thread and on all. Below {SMALL:,} columns ByzFL and
torch.sort are timed on one thread too, and the better time counts. Targets in parentheses; those for n = 100 were set
for AVX-512. The error is the largest difference from float64, over the largest entry.

{lines_of_table}

## The other rules, and steps before the mean and alone, at (20, 4, {columns(1_000_000):,})

| rule | ours, ms | ByzFL, ms | ByzFL over ours | ours over our mean |
|---|---|---|---|---|
{lines_of_rules}

ByzFL's geometric median is three smoothed steps; ours without a suffix is accurate to its tolerance. Some of its steps
overwrite their argument, which ours never do: they are given a copy, in memory that is there already, and the second
line leaves its time out.
"""
    if torch.cuda.is_available():
        text += "\n## On a GPU\n\n" + "\n".join(throughput_table()) + "\n"
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text)
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
