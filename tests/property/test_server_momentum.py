"""Server momentum on what is released equals the paper's, inside the rule, for the trimmed mean."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.aggregation import make_rule
from ps.privacy.released import Unreleased
from ps.update import Mechanism, advance, initial_state, release


def trimmed_mean(x: np.ndarray, f: int) -> np.ndarray:
    return np.sort(x, axis=0)[f : len(x) - f].mean(axis=0)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([(1, 0), (5, 1), (7, 3), (11, 3), (20, 4)]),
    beta=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
    z=st.sampled_from([0.0, 0.01, 0.3, 2.0]),
    clip_norm=st.sampled_from([0.5, 1.0]),
)
def test_momentum_outside_the_rule_is_the_papers_inside_form_over_fifty_rounds(seed, size, beta, z, clip_norm):
    (n, f), d, eta, alpha = size, 6, 0.05, 0.5
    rng = np.random.default_rng(seed)
    mechanism = Mechanism(make_rule("trimmed_mean", num_byzantine=f), n, f, clip_norm, z)
    sensitivity = 2 * clip_norm / (n - 2 * f)

    start = rng.standard_normal(d).astype(np.float32)
    ours = initial_state(torch.from_numpy(start.copy()))
    theta, R = start.astype(np.float64), np.zeros(d)
    momenta = np.zeros((n, d))
    for _ in range(50):
        gradients = rng.standard_normal((n, d)) * rng.lognormal(0, 1, (n, 1))
        norms = np.linalg.norm(gradients, axis=1, keepdims=True)
        momenta = alpha * momenta + (1 - alpha) * gradients * np.minimum(1, clip_norm / norms)
        sent = momenta.astype(np.float32)
        sent[n - f :] = rng.standard_normal((f, d)) * 100
        rows = torch.from_numpy(sent.copy())
        for row in rows:
            mechanism.condition(row)
        xi = rng.standard_normal(d)

        M = beta * R + (1 - beta) * rows.numpy().astype(np.float64)
        R = trimmed_mean(M, f) + (1 - beta) * z * sensitivity * xi
        theta = theta - eta * R

        released = release(mechanism, Unreleased(rows), range(n), xi if z else None)
        ours = advance(ours, released, eta, beta)
        scale = max(1.0, float(np.abs(R).max()))
        assert np.abs(ours.momentum.numpy() - R).max() <= 1e-6 * scale
    assert np.abs(ours.theta.numpy() - theta).max() <= 1e-6 * max(1.0, float(np.abs(theta).max()))
    assert ours.round_id == 50
