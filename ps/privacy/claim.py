"""What an experiment claims: its premises, its neighbouring relation, and whether it may be called private."""

from __future__ import annotations

from collections.abc import Sequence

from common.config import Experiment
from ps.privacy.premises import P2, premises_of, privacy_status

__all__ = ["claim_of", "neighbouring", "premises_for"]

ANY = "one client's data replaced"
SAME_SIZE = "one client's data replaced by as many samples"


def premises_for(experiment: Experiment, previous: Sequence[str] = ()) -> tuple[str, ...]:
    """What the experiment's privacy claim rests on, given the premises of earlier runs on the same budget."""
    privacy = experiment.privacy
    return premises_of(
        strict=privacy.premise == "strict",
        round_timing=privacy.round_timing,
        rescale=privacy.missing == "rescale",
        previous=previous,
    )


def claim_of(experiment: Experiment, premises: Sequence[str], *, late: int = 0) -> tuple[bool, str]:
    """Whether a run of the experiment may be called private, and why; under the premises of its ledger.

    ``late`` models were published behind the public schedule, so that their times may tell something: that is what P2
    excludes, and what strict cannot do without.
    """
    if late and experiment.privacy.premise == "strict":
        behind = f"{late} models were published behind the public schedule, which the strict premise needs"
        return False, f"not private: {behind}; raise network.publish_margin_s"
    if late:
        premises = sorted({*premises, P2})
    return privacy_status(
        epsilon=experiment.privacy.epsilon,
        delta=experiment.privacy.delta,
        wiretap=experiment.attack.knowledge == "omniscient" and experiment.num_adversaries > 0,
        noise_secret=experiment.privacy.noise_seed is None,
        copied_data=experiment.data.deal_to == "honest" and experiment.num_adversaries > 0,
        premises=premises,
    )


def neighbouring(experiment: Experiment, earlier: Sequence[str] = ()) -> str:
    """What may differ between two runs that are to look alike; no more than in earlier runs on the same budget."""
    return SAME_SIZE if experiment.federation.weights == "samples" or SAME_SIZE in earlier else ANY
