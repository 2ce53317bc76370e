"""Fast kernels of the coordinate-wise trimmed mean. One network, described once, emitted for whatever runs it.

``network``   which comparisons are needed, pure Python
``cpp``       the network as C++; ``library`` compiles, caches and loads it; ``compiled`` calls it
``gpu``       the network as Triton
``plain``     sorting, for when there is no compiler
``dispatch``  which of them runs
"""

from __future__ import annotations

from common.aggregation.kernels.dispatch import Dispatcher

__all__ = ["trimmed"]

trimmed = Dispatcher()
