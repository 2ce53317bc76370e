"""What a private run costs, and whether it can learn, before it is run.

:func:`plan` fills in what follows from what is given: of ε, δ, T and z any three give the fourth; n, f, C and the rule
give the sensitivity S, hence σ = z S; with d too, the signal over the noise, and how many clients would be needed.
:func:`warnings_of` says the same of a run that is about to start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from common.errors import PrivacyError
from common.privacy.calibration import (
    Calibration,
    calibrate,
    epsilon_exact,
    epsilon_renyi,
    mu_of,
    sigma_of,
    sufficient_multiplier,
)
from common.schedules import Schedule
from ps.privacy.outlook import LEARNS, Course, Mechanisms, cannot_learn
from ps.privacy.plan_checks import (
    check_federation,
    check_ranges,
    check_sufficient,
    given_multiplier,
    number_or_share,
    one_of,
    radius_of,
    schedule_of,
)
from ps.privacy.planned import Plan
from ps.privacy.signal import Learning, sensitivity_of
from ps.privacy.solved import Four, rounds_within, solve

if TYPE_CHECKING:
    from common.config import Experiment
    from ps.release import Mechanism

__all__ = ["LEARNS", "Plan", "plan", "warnings_of"]


def plan(
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    rounds: int | None = None,
    noise_multiplier: float | None = None,
    sigma: float | None = None,
    calibration: Calibration = "exact",
    clients: int | None = None,
    byzantine: int | Fraction | None = None,
    clip_norm: float | Literal["none"] | None = None,
    rule: str = "trimmed_mean",
    rule_parameters: Mapping[str, Any] | None = None,
    folders: Sequence[Path] = (),
    weights: Sequence[float] | None = None,
    premise: Literal["independent", "strict"] = "independent",
    server_momentum: float | Schedule | None = None,
    server_momentum_form: Literal["outside", "inside"] = "outside",
    learning_rate: float | Schedule | None = None,
    parameters: int | None = None,
    signal_to_noise: float = 1.0,
) -> Plan:
    """Everything that follows from what is given; None stands for what is not given.

    Parameters
    ----------
    epsilon, delta, rounds, noise_multiplier
        Any three give the fourth. ``epsilon``, ``delta`` and ``parameters`` are enough for the clients needed.
    sigma
        σ per coordinate of a release, in place of z; needs ``clients``.
    calibration
        The conversion ε is stated by.
    clients, byzantine
        n, and f; a Fraction is a share of n, and f its floor. Default f = 0.
    clip_norm
        C, default 1; ``"none"`` for a rule that needs none.
    rule, rule_parameters, folders, weights
        As :func:`common.aggregation.make_rule` takes them; and a public weight per identity, for rules with weights.
    premise
        What S is charged for: docs/guarantees.md, premise P4.
    server_momentum, server_momentum_form, learning_rate
        β, where it is applied, and η; numbers or schedules, default 0.9 and 0.1. Outside the rule β has no part in
        privacy.
    parameters
        d.
    signal_to_noise
        The ratio that ``clients_needed`` is for.

    Raises
    ------
    PrivacyError
        Something is missing, out of range, or contradicts something else; the message says what, and what would do.
    RuleError, ConfigError
        There is no such rule, or it is not defined for n and f.

    Examples
    --------
    >>> found = plan(epsilon=8.0, delta=1e-5, rounds=800, clients=300, byzantine=15, parameters=26_010)
    >>> round(found.noise_multiplier, 6), round(found.sensitivity, 6), found.clients_needed
    (16.977042, 0.007407, 218)
    """
    check_ranges(
        epsilon=epsilon,
        delta=delta,
        rounds=rounds,
        noise_multiplier=noise_multiplier,
        sigma=sigma,
        clients=clients,
        parameters=parameters,
        signal_to_noise=signal_to_noise,
    )
    one_of("calibration", calibration, "exact", "renyi")
    one_of("premise", premise, "independent", "strict")
    one_of("server_momentum_form", server_momentum_form, "outside", "inside")
    eta = schedule_of("learning_rate", 0.1 if learning_rate is None else learning_rate)
    beta = schedule_of("server_momentum", 0.9 if server_momentum is None else server_momentum)
    mechanisms = Mechanisms(
        rule,
        number_or_share(byzantine),
        radius_of(clip_norm),
        premise == "strict",
        server_momentum_form == "inside",
        dict(rule_parameters or {}),
        tuple(folders),
    )

    charged: dict[bool, float] = {}  # S by premise: strict or not
    if clients is not None:
        check_federation(clients, mechanisms.byzantine_of(clients), delta)
        for strict in (False, True):
            mechanism = mechanisms.of(clients, 1.0, strict=strict, weights=weights)
            charged[strict] = sensitivity_of(mechanism, parameters, beta(0))
    sensitivity = charged.get(mechanisms.strict)

    found = solve(Four(epsilon, delta, rounds, given_multiplier(noise_multiplier, sigma, sensitivity)), calibration)
    check_sufficient(found, parameters)
    z = found.noise_multiplier
    any_z = 1.0 if z is None else z
    if clients is not None:
        mechanisms.of(clients, any_z, weights=weights)  # refuses what the parameter server would

    learning: Learning | None = None
    needed: int | None = None
    course = _course_of(found, calibration, parameters, eta, beta)
    if course is not None:
        if clients is not None:
            learning = course.learning(mechanisms.of(clients, any_z, weights=weights))
        if any_z > 0.0:
            needed = course.clients_needed(mechanisms, any_z, signal_to_noise)

    said = []
    if z == 0.0:
        said.append("a noise multiplier of 0 is no privacy: epsilon is infinite")
    if course is not None and learning is not None and learning.ratio is not None and learning.ratio < LEARNS:
        said.append(
            cannot_learn(learning.ratio, needed, signal_to_noise, found.epsilon, course.num_parameters, mechanisms)
        )
    if needed is not None and found.delta is not None and needed * found.delta >= 1:
        said.append(
            f"with {needed} clients delta must be below {1 / needed:.3g}, and a smaller delta needs more clients: plan "
            f"again with less than {found.delta:g}"
        )

    share = mechanisms.share
    return Plan(
        calibration=calibration,
        epsilon=_finite(found.epsilon),
        delta=found.delta,
        rounds=found.rounds,
        noise_multiplier=z,
        rounds_that_fit=_rounds_that_fit(found, calibration),
        rule=rule,
        clients=clients,
        byzantine=None if share and clients is None else mechanisms.byzantine_of(clients or 0),
        byzantine_share=f"{float(100 * share):g}%" if share else None,
        clip_norm=mechanisms.clip_norm,
        premise=premise,
        server_momentum=beta.as_json(),
        server_momentum_form=server_momentum_form,
        learning_rate=eta.as_json(),
        parameters=parameters,
        sensitivity=sensitivity,
        sensitivity_independent=charged.get(False),
        sensitivity_strict=charged.get(True),
        sigma=sigma if sigma is not None or z is None or sensitivity is None else _finite(sigma_of(z, sensitivity)),
        signal_to_noise_wanted=signal_to_noise,
        clients_needed=needed,
        derived=_derived(Four(epsilon, delta, rounds, noise_multiplier), found),
        assumed=_assumed(
            clients is not None or parameters is not None,
            byzantine=byzantine,
            clip_norm=clip_norm,
            server_momentum=server_momentum,
            learning_rate=learning_rate,
        ),
        warnings=tuple(said),
        **_side_by_side(found),
        **_outlook(learning),
    )


def warnings_of(experiment: Experiment, mechanism: Mechanism, num_parameters: int) -> list[str]:
    """What should be known before this run starts: one sentence if it is not expected to learn well, else none.

    Parameters
    ----------
    experiment
        The run's.
    mechanism
        As made from it, with the run's z.
    num_parameters
        d.
    """
    if not mechanism.private:
        return []
    training, f, n = experiment.training, mechanism.num_byzantine, mechanism.num_clients
    course = Course(
        num_parameters,
        training.schedule_of("learning_rate"),
        training.schedule_of("server_momentum"),
        training.rounds,
    )
    learning = course.learning(mechanism)
    if learning.ratio is None or learning.ratio >= LEARNS:
        return []
    mechanisms = Mechanisms(
        experiment.aggregation.rule,
        Fraction(f, n) if f else 0,
        mechanism.clip_norm,
        mechanism.strict,
        mechanism.inside,
        experiment.aggregation.parameters,
        experiment.folders,
    )
    needed = course.clients_needed(mechanisms, mechanism.noise_multiplier, 1.0)
    return [cannot_learn(learning.ratio, needed, 1.0, experiment.privacy.epsilon, num_parameters, mechanisms)]


def _course_of(
    found: Four, calibration: Calibration, parameters: int | None, learning_rate: Schedule, server_momentum: Schedule
) -> Course | None:
    """What signal and noise depend on; None where d is unknown, or both z and μ."""
    if parameters is None:
        return None
    if found.noise_multiplier is not None and found.rounds is not None:
        return Course(parameters, learning_rate, server_momentum, found.rounds)
    if found.epsilon is not None and found.delta is not None:
        mu = mu_of(found.epsilon, found.delta, calibration)
        return Course(parameters, learning_rate, server_momentum, None, mu)
    return None


def _side_by_side(found: Four) -> dict[str, Any]:
    """ε of both conversions, z of both calibrations and of the closed form."""
    eps, delta, rounds, z = found.epsilon, found.delta, found.rounds, found.noise_multiplier
    names = ("epsilon_exact", "epsilon_renyi", "noise_multiplier_exact", "noise_multiplier_renyi")
    values: dict[str, Any] = dict.fromkeys((*names, "noise_multiplier_sufficient", "sufficient_refused"))
    if delta is None or rounds is None:
        return values
    if z is not None:
        values["epsilon_exact"] = _finite(epsilon_exact(z, rounds, delta))
        values["epsilon_renyi"] = _finite(epsilon_renyi(z, rounds, delta))
    if eps is None or not 0 < eps < math.inf:
        return values
    calibrations: tuple[Calibration, ...] = ("exact", "renyi")
    for name in calibrations:
        with suppress(PrivacyError):  # an ε so extreme that no float64 is its multiplier
            values[f"noise_multiplier_{name}"] = calibrate(eps, delta, rounds, name)
    try:
        values["noise_multiplier_sufficient"] = _finite(sufficient_multiplier(eps, delta, rounds))
    except PrivacyError as problem:
        values["sufficient_refused"] = str(problem)
    return values


def _outlook(learning: Learning | None) -> dict[str, Any]:
    if learning is None:
        return dict.fromkeys(
            ("noise_norm", "signal_norm", "noise_displacement", "signal_displacement", "signal_to_noise")
        )
    return {
        "noise_norm": _finite(learning.noise_norm),
        "signal_norm": _finite(learning.signal_norm),
        "noise_displacement": _finite(learning.noise_displacement),
        "signal_displacement": _finite(learning.signal_displacement),
        "signal_to_noise": _finite(learning.ratio),
    }


def _rounds_that_fit(found: Four, calibration: Calibration) -> int | None:
    eps, delta, z = found.epsilon, found.delta, found.noise_multiplier
    if eps is None or delta is None or z is None or not math.isfinite(eps):
        return None
    return rounds_within(eps, delta, z, calibration)


def _derived(given: Four, found: Four) -> tuple[str, ...]:
    before, after = asdict(given), asdict(found)
    return tuple(name for name, value in after.items() if value is not None and before[name] is None)


def _assumed(matters: bool, **given: Any) -> tuple[str, ...]:
    return tuple(name for name, value in given.items() if value is None) if matters else ()


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
