"""``byzuldp privacy plan``: what a private run costs, and whether it can learn, before it is run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fractions import Fraction

    from common.config import Experiment

__all__ = ["plan"]

_SHAPES = {"mnist": ((1, 28, 28), 10), "fashion_mnist": ((1, 28, 28), 10), "cifar10": ((3, 32, 32), 10)}
"""Of data sets that need not be there for a model to be counted."""


def plan(
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="A TOML file, or the name of a ready experiment: its values hold where no option says otherwise.",
            show_default=False,
        ),
    ] = None,
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="ε for all rounds together.")] = None,
    delta: Annotated[float | None, typer.Option("--delta", help="δ, below 1/clients.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="T.")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option("--noise-multiplier", help="z: the noise over the sensitivity.")
    ] = None,
    sigma: Annotated[
        float | None, typer.Option("--sigma", help="σ = z·S: the noise per coordinate of what a round releases.")
    ] = None,
    clients: Annotated[int | None, typer.Option("--clients", help="n: identities on the roster.")] = None,
    byzantine: Annotated[
        str | None,
        typer.Option("--byzantine", metavar="NUMBER|SHARE", help="f, or a share of n such as 5%. Default 0."),
    ] = None,
    clip_norm: Annotated[
        str | None, typer.Option("--clip-norm", metavar="NUMBER|none", help="C: norm of a clipped gradient. Default 1.")
    ] = None,
    server_momentum: Annotated[
        float | None, typer.Option("--server-momentum", help="β. Outside the rule it has no part in ε. Default 0.9.")
    ] = None,
    server_momentum_form: Annotated[
        str | None, typer.Option("--server-momentum-form", help="outside (default) or inside the rule.")
    ] = None,
    rule: Annotated[
        str | None, typer.Option("--rule", help="The aggregation rule. Default trimmed_mean.", show_default=False)
    ] = None,
    calibration: Annotated[str | None, typer.Option("--calibration", help="exact (default) or renyi.")] = None,
    premise: Annotated[
        str | None, typer.Option("--premise", help="independent (default), or strict: adversaries read honest momenta.")
    ] = None,
    parameters: Annotated[int | None, typer.Option("--parameters", help="d: parameters of the model.")] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate", help="η. Default 0.1.")] = None,
    signal_to_noise: Annotated[
        float, typer.Option("--signal-to-noise", help="The ratio to count the clients needed for.")
    ] = 1.0,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a value of the experiment; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say what a private run costs, and whether it can learn.

    Of ε, δ, rounds and noise (--noise-multiplier or --sigma) any three give the fourth. With --clients and --parameters
    the signal is compared with the noise; --epsilon, --delta and --parameters alone say how many clients are needed.
    """
    import json

    from ps.privacy.plan import plan as plan_of

    given: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": delta,
        "rounds": rounds,
        "noise_multiplier": noise_multiplier,
        "sigma": sigma,
        "clients": clients,
        "byzantine": _byzantine(byzantine),
        "clip_norm": _clip_norm(clip_norm),
        "server_momentum": server_momentum,
        "server_momentum_form": server_momentum_form,
        "rule": rule,
        "calibration": calibration,
        "premise": premise,
        "parameters": parameters,
        "learning_rate": learning_rate,
    }
    asked = {name: value for name, value in given.items() if value is not None}
    notes: list[str] = []
    if experiment is not None:
        from common.config import load_experiment

        asked = _with_defaults(asked, load_experiment(experiment, set_ or ()), notes)
    elif set_:
        raise typer.BadParameter("changes a value of an experiment: name one", param_hint="--set")
    found = plan_of(**asked, signal_to_noise=signal_to_noise)
    if as_json:
        values = found.as_json()
        values["warnings"] = [*values["warnings"], *notes]
        typer.echo(json.dumps(values, indent=2, allow_nan=False))
        return
    from deploy.privacy.plan_text import text_of

    typer.echo(text_of(found, notes))


def _with_defaults(asked: dict[str, Any], experiment: Experiment, notes: list[str]) -> dict[str, Any]:
    """What was asked for, and the experiment's values for the rest.

    Of ε, T and the noise two are enough: the noise and ε given replace the experiment's T, the noise alone its ε.
    """
    federation, training, privacy = experiment.federation, experiment.training, experiment.privacy
    defaults: dict[str, Any] = {
        "epsilon": privacy.epsilon,
        "delta": privacy.delta,
        "rounds": training.rounds,
        "calibration": privacy.calibration,
        "clients": federation.clients,
        "byzantine": federation.byzantine,
        "clip_norm": "none" if training.clip_norm is None else training.clip_norm,
        "server_momentum": training.schedule_of("server_momentum"),
        "server_momentum_form": training.server_momentum_form,
        "learning_rate": training.schedule_of("learning_rate"),
        "premise": privacy.premise,
    }
    if "noise_multiplier" in asked or "sigma" in asked:
        del defaults["rounds" if "epsilon" in asked and "rounds" not in asked else "epsilon"]
    if asked.get("rule", experiment.aggregation.rule) == experiment.aggregation.rule:
        defaults["rule"] = experiment.aggregation.rule
        defaults["rule_parameters"] = experiment.aggregation.parameters
        if asked.get("clients", federation.clients) == federation.clients and federation.weights != "equal":
            defaults["weights"] = _weights(experiment)
    defaults["folders"] = experiment.folders
    if "parameters" not in asked:
        defaults["parameters"] = _parameters(experiment)
    if privacy.previous:
        notes.append("privacy.previous is not counted here: what earlier runs have spent adds to this run's noise")
    if privacy.missing == "rescale":
        notes.append('privacy.missing = "rescale": the noise is for a round in which every client answers')
    return {name: value for name, value in defaults.items() if value is not None} | asked


def _parameters(experiment: Experiment) -> int:
    """d, without the data where its shape is known."""
    if experiment.data.dataset not in _SHAPES:
        from common.learning.task import build_task

        return build_task(experiment).num_parameters
    from common.learning.gradient import FlatModel
    from common.learning.models import build_model

    shape, classes = _SHAPES[experiment.data.dataset]
    module = build_model(experiment.model, shape, classes, experiment.training.seed, experiment.folders)
    return FlatModel(module, frozen_buffers=experiment.model.frozen_buffers).num_parameters


def _weights(experiment: Experiment) -> list[float] | None:
    """The public weight of each identity, as the parameter server would have it."""
    from common.learning.datasets import load_dataset
    from ps.mechanism import mechanism_of

    def labels() -> Any:
        return load_dataset(experiment.data.dataset, experiment.data.root, experiment.folders).train.labels

    weights = getattr(mechanism_of(experiment, None, labels).rule, "weights", None)
    return None if weights is None else [float(weight) for weight in weights]


def _byzantine(text: str | None) -> int | Fraction | None:
    """``15``, or ``5%`` as a share."""
    if text is None:
        return None
    from fractions import Fraction

    from common.errors import ConfigError

    try:
        return Fraction(text.strip()[:-1]) / 100 if text.strip().endswith("%") else int(text)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"--byzantine {text!r}: expected a number of clients, or a share such as 5%") from None


def _clip_norm(text: str | None) -> float | str | None:
    from common.errors import ConfigError

    if text is None or text == "none":
        return text
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--clip-norm {text!r}: expected a number, or none") from None
