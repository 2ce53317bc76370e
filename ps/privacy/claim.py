"""What an experiment claims: its premises, its neighbouring relation, and whether it may be called private."""

from __future__ import annotations

from collections.abc import Sequence

from common.config import Experiment
from ps.privacy.premises import premises_of, privacy_status

__all__ = ["claim_of", "neighbouring", "premises_for"]


def premises_for(experiment: Experiment, previous: Sequence[str] = ()) -> tuple[str, ...]:
    """What the experiment's privacy claim rests on, given the premises of earlier runs on the same budget."""
    privacy = experiment.privacy
    return premises_of(
        strict=privacy.premise == "strict",
        round_timing=privacy.round_timing,
        rescale=privacy.missing == "rescale",
        previous=previous,
    )


def claim_of(experiment: Experiment, premises: Sequence[str]) -> tuple[bool, str]:
    """Whether a run of the experiment may be called private, and why; under the premises of its ledger."""
    return privacy_status(
        epsilon=experiment.privacy.epsilon,
        delta=experiment.privacy.delta,
        wiretap=experiment.attack.knowledge == "omniscient" and experiment.num_adversaries > 0,
        noise_secret=experiment.privacy.noise_seed is None,
        copied_data=experiment.data.deal_to == "honest" and experiment.num_adversaries > 0,
        premises=premises,
    )


def neighbouring(experiment: Experiment) -> str:
    """What may differ between two runs that are to look alike."""
    if experiment.federation.weights == "samples":
        return "one client's data replaced by as many samples"
    return "one client's data replaced"
