"""Pre-aggregation: what is done to the rows before a rule sees them."""

from __future__ import annotations

from common.aggregation.before.adaptive_clipping import AdaptiveClipping
from common.aggregation.before.bucketing import Bucketing
from common.aggregation.before.clipping import Clipping
from common.aggregation.before.nearest_neighbor_mixing import NearestNeighborMixing
from common.aggregation.before.preparation import Preparation

__all__ = ["BEFORE", "Preparation"]

BEFORE: dict[str, type[Preparation]] = {
    step.name: step for step in (AdaptiveClipping, Bucketing, Clipping, NearestNeighborMixing)
}
