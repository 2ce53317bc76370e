"""Plays random schedules of rounds until one breaks a rule; ``make simulate`` runs it.

As many schedules as you like:       python tests/support/simulate.py --schedules 1000000 --seed 0
One of them, told in full:           python tests/support/simulate.py --schedules 1 --seed 1234 --tell
What is found of the planted bugs:   python tests/support/simulate.py --planted
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from time import monotonic

from round_simulator import play_all, told

PIECE = 2000
"""Schedules of a process at a time."""
TOLD_EVERY_S = 10.0
"""Progress, where the output is not a terminal."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Play random schedules of rounds until one breaks a rule.")
    parser.add_argument("--schedules", type=int, default=1_000_000, help="how many seeds (default: a million)")
    parser.add_argument("--seed", type=int, default=0, help="the first one (default: 0)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default: one for each core")
    parser.add_argument("--tell", action="store_true", help="tell everything that happens in them")
    parser.add_argument("--planted", action="store_true", help="say what is found of the planted bugs, in Markdown")
    given = parser.parse_args()
    if given.planted:
        from planted import tables  # which needs the whole server

        print(tables())
        return
    seeds = range(given.seed, given.seed + given.schedules)
    if given.tell:
        for seed in seeds:
            print(f"seed {seed}\n{told(seed)}")
    began = monotonic()
    seen = play(seeds, given.processes)
    print(f"{len(seeds)} schedules, seeds {seeds[0]} to {seeds[-1]}, {pace(len(seeds), began)}: no rule was broken.")
    print("Met:", *(f"{times:>12}  {what}" for what, times in sorted(seen.items())), sep="\n")


def play(seeds: range, processes: int) -> Counter[str]:
    """Everything that was met; exits with the story of the first schedule that breaks a rule."""
    pieces = list(in_pieces(seeds))
    if processes == 1:
        return gathered(map(play_all, pieces), len(seeds))
    with ProcessPoolExecutor(min(processes, len(pieces))) as pool:
        try:
            return gathered(pool.map(play_all, pieces), len(seeds))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def gathered(results: Iterator[Counter[str]], schedules: int) -> Counter[str]:
    """The sum of what comes, while it comes; says how far it is."""
    terminal, began, told_at = sys.stderr.isatty(), monotonic(), 0.0
    seen, done = Counter[str](), 0
    try:
        for met in results:
            seen.update(met)
            done = min(done + PIECE, schedules)
            if terminal or monotonic() - told_at > TOLD_EVERY_S or done == schedules:
                told_at = monotonic()
                line = f"{done} of {schedules}, {pace(done, began)}"
                start, end = ("\r", "\n" if done == schedules else "") if terminal else ("", "\n")
                print(start + line, end=end, file=sys.stderr, flush=True)
    except AssertionError as failure:
        raise SystemExit(f"{failure}\n{command(str(failure))}") from None
    return seen


def in_pieces(seeds: range) -> Iterator[range]:
    for start in range(0, len(seeds), PIECE):
        yield seeds[start : start + PIECE]


def pace(done: int, began: float) -> str:
    took = monotonic() - began
    return f"{took:.0f} s, {done / max(took, 1e-3):.0f} a second"


def command(failure: str) -> str:
    """How to see that failure again; :func:`round_simulator.play_all` says ``seed 1234: …``."""
    seed = failure.split(":", 1)[0].removeprefix("seed ")
    return (
        f"Again: make simulate SCHEDULES=1 SEED={seed}\n"
        f"In full: python tests/support/simulate.py --schedules 1 --seed {seed} --tell"
    )


if __name__ == "__main__":
    main()
