"""The selection network of the trimmed mean: which comparisons leave the f extremes at each end apart from the rest.

A comparator (i, j) puts the smaller of two wires on i and the larger on j. The trimmed mean needs no order, only three
sets: the f smallest, the f largest, and the kept. This module describes the network once; the emitters beside it turn
the description into C++, into a table for an interpreter, and into Triton.

The wires are cut into blocks of at least 2f. Odd-even merge sort (Batcher 1968) sorts each block; then the lowest f of
two blocks are merged with each other, and likewise the highest, since what is not among the lowest f of its own block
is not among the lowest f of all. The last merge need not sort: of two sorted lists, the lower ones of the pairs
(a_i, b_{f-1-i}) are the lowest f. Finally, comparators that do not change the three sets are pruned, which takes away
most of the sorting of the middles.

=========  ==================  ====================================
n, f       this network        one odd-even merge sort, pruned
=========  ==================  ====================================
20, 4      67 comparators      84
50, 10     287                 334
100, 20    803                 908
300, 15    2464                3790
1000, 50   13605               18654
=========  ==================  ====================================

References
----------
Batcher 1968, "Sorting networks and their applications".
Knuth, "The Art of Computer Programming", volume 3, section 5.3.4 (the zero-one principle).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

__all__ = ["Comparator", "Network", "network"]

_CANDIDATES = 32  # block sizes that are tried
_LOW, _KEPT, _HIGH = range(3)

Comparators = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Comparator:
    """The smaller value to wire ``low``, the larger to wire ``high``; an output that nobody reads is not needed."""

    low: int
    high: int
    needs_low: bool = True
    needs_high: bool = True


@dataclass(frozen=True)
class Network:
    """Comparators, in an order that works on few wires at a time, and the wires that hold the kept values at the end.

    Parameters
    ----------
    num_wires
        n.
    trimmed
        f, at each end.
    comparators
        To be applied in this order.
    kept
        n - 2f wires.
    """

    num_wires: int
    trimmed: int
    comparators: tuple[Comparator, ...]
    kept: tuple[int, ...]


@lru_cache(maxsize=64)
def network(n: int, f: int) -> Network:
    """The network that keeps order statistics f + 1 … n - f of n values, as a set.

    Parameters
    ----------
    n, f
        Integers with 0 ≤ f and 2f < n.

    Raises
    ------
    ValueError
        They are not.

    Notes
    -----
    O(n log² n) comparators. Building it takes 1 ms for 20 wires and a good part of a second for 1000.

    Examples
    --------
    >>> net = network(3, 1)
    >>> [(c.low, c.high) for c in net.comparators], net.kept
    ([(1, 2), (0, 2), (0, 1)], (1,))
    """
    if not 0 <= 2 * f < n:
        raise ValueError(f"n = {n}, f = {f}: expected 0 <= f and 2f < n")
    if f == 0:
        return Network(n, 0, (), tuple(range(n)))
    sizes = _blocks(n, f)
    comparators: Comparators = []
    classes = [_KEPT] * n
    lowest, highest = _sorted_block(range(sizes[0]), f, comparators)
    start = sizes[0]
    for size in sizes[1:]:
        low, high = _sorted_block(range(start, start + size), f, comparators)
        start += size
        if start < n:
            lowest = _merged(lowest, low, comparators)[:f]
            highest = _merged(highest, high, comparators)[-f:]
        else:
            comparators += zip(lowest, reversed(low), strict=True)
            comparators += zip(highest, reversed(high), strict=True)
            highest = high
    for wire in lowest:
        classes[wire] = _LOW
    for wire in highest:
        classes[wire] = _HIGH
    return Network(
        n,
        f,
        _without_unread(_pruned(comparators, classes), classes),
        tuple(wire for wire in range(n) if classes[wire] == _KEPT),
    )


def _blocks(n: int, f: int) -> list[int]:
    """Sizes of blocks, each at least 2f, with the fewest comparators: equal ones, and one for what is left."""
    best, sizes = _block_cost(n, f, True) if n < 8 * f else None, [n]
    between = 2 * _merge_cost(f)
    smallest, largest = max(2 * f, 2), min(n - 2 * f, 4 * f + 8)
    for size in range(smallest, largest + 1, max(1, (largest - smallest) // _CANDIDATES)):
        count = (n - 2 * f) // size
        rest = n - count * size
        cost = count * _block_cost(size, f, False) + _block_cost(rest, f, False) + (count - 1) * between + 2 * f
        if best is None or cost < best:
            best, sizes = cost, [rest, *[size] * count]
    return sizes


@lru_cache(maxsize=1024)
def _block_cost(size: int, f: int, alone: bool) -> int:
    """Comparators that sort the lowest and the highest f of a block, or only separate them if it is the only one."""
    comparators: Comparators = []
    order = _sorted(list(range(size)), comparators)
    classes = [_KEPT] * size
    for rank in range(f):
        classes[order[rank]] = _LOW if alone else -1 - rank
        classes[order[-1 - rank]] = _HIGH if alone else -1 - f - rank
    return len(_pruned(comparators, classes))


@lru_cache(maxsize=64)
def _merge_cost(f: int) -> int:
    """Comparators that sort the lowest f of two sorted lists of f."""
    comparators: Comparators = []
    order = _merged(list(range(f)), list(range(f, 2 * f)), comparators)
    classes = [_KEPT] * (2 * f)
    for rank in range(f):
        classes[order[rank]] = -1 - rank
    return len(_pruned(comparators, classes))


def _sorted_block(wires: range, f: int, comparators: Comparators) -> tuple[list[int], list[int]]:
    order = _sorted(list(wires), comparators)
    return order[:f], order[len(order) - f :]


def _sorted(wires: list[int], comparators: Comparators) -> list[int]:
    """Sort the wires, half by half; returns them in the order of their values."""
    if len(wires) < 2:
        return wires
    half = len(wires) // 2
    return _merged(_sorted(wires[:half], comparators), _sorted(wires[half:], comparators), comparators)


def _merged(one: list[int], other: list[int], comparators: Comparators) -> list[int]:
    """Batcher's odd-even merge of two sorted lists of any lengths."""
    if not one or not other:
        return one or other
    if len(one) == len(other) == 1:
        comparators.append((one[0], other[0]))
        return [one[0], other[0]]
    even = _merged(one[::2], other[::2], comparators)
    odd = _merged(one[1::2], other[1::2], comparators)
    order = even[:1]
    for k in range(max(len(odd), len(even) - 1)):
        pair = odd[k : k + 1] + even[k + 1 : k + 2]
        if len(pair) == 2:
            comparators.append((pair[0], pair[1]))
        order += pair
    return order


def _pruned(comparators: Comparators, classes: list[int]) -> Comparators:
    """Without those whose two outputs end in the same class: which of the two wires holds which value is free there."""
    used = [False] * len(classes)
    needed: Comparators = []
    for low, high in reversed(comparators):
        if used[low] or used[high] or classes[low] != classes[high]:
            used[low] = used[high] = True
            needed.append((low, high))
    needed.reverse()
    return needed


def _without_unread(comparators: Comparators, classes: list[int]) -> tuple[Comparator, ...]:
    """Mark outputs that end in a trimmed set: half a comparator is enough there."""
    read = [kind == _KEPT for kind in classes]
    marked: list[Comparator] = []
    for low, high in reversed(comparators):
        if read[low] or read[high]:
            marked.append(Comparator(low, high, read[low], read[high]))
            read[low] = read[high] = True
    return tuple(reversed(marked))
