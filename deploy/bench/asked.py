"""What is to be measured: a grid of n and d, and what each of its points is as an experiment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.config import Experiment, experiment_from, with_overrides
from common.errors import ConfigError
from deploy.bench.machine import available_bytes
from deploy.bench.task import DATASET, MOST_CLIENTS, model_name

__all__ = ["Load", "Setting", "grid", "numbers", "refuse_too_large"]

MOST_PROCESSES = 20
BYTES_OF_A_FLOAT = 4


@dataclass(frozen=True)
class Load:
    """What the clients do instead of training."""

    compute_s: float = 0.0
    seed: int = 1


@dataclass(frozen=True)
class Setting:
    """One point of the grid.

    Attributes
    ----------
    byzantine
        f that the rule is made for; nobody attacks.
    rounds, warm_up
        Those that count, and those before them that do not.
    processes
        Client processes; each holds about as many identities, each of them over a connection of its own.
    overrides
        ``section.key=value`` assignments to the experiment.
    """

    clients: int
    dimension: int
    byzantine: int
    rounds: int
    warm_up: int
    processes: int
    rule: str
    epsilon: float | None
    delta: float
    load: Load = Load()
    overrides: tuple[str, ...] = field(default=())

    @property
    def per_process(self) -> int:
        return math.ceil(self.clients / self.processes)

    def experiment(self, network: Mapping[str, Any] | None = None) -> Experiment:
        """Everything that is not asked for is at its default.

        Raises
        ------
        ConfigError
            The overrides cannot be had.
        """
        rounds = self.warm_up + self.rounds
        tree: dict[str, Any] = {
            "federation": {
                "clients": self.clients,
                "byzantine": self.byzantine,
                "clients_per_process": self.per_process,
            },
            "training": {"rounds": rounds, "seed": self.load.seed},
            "evaluation": {"every": rounds + 1},
            "aggregation": {"rule": self.rule},
            "privacy": {"delta": self.delta} | ({} if self.epsilon is None else {"epsilon": self.epsilon}),
            "data": {"dataset": DATASET, "partition": "iid"},
            "model": {"name": model_name(self.dimension)},
            "network": dict(network or {}),
        }
        return experiment_from(with_overrides(tree, self.overrides), where="the benchmark's experiment")

    def title(self) -> str:
        return f"n = {self.clients:,}, d = {self.dimension:,}"


def numbers(text: str, option: str, *, most: int | None = None) -> list[int]:
    """``4,20`` as whole numbers of at least 1; ``1e6`` and ``26_010`` are as good.

    Raises
    ------
    ConfigError
        One of them is none, is too large, or comes twice.
    """
    found: list[int] = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not (1 <= value < math.inf and value.is_integer()):
            raise ConfigError(f"{option} {text!r}: {part.strip()!r} is no whole number of at least 1; write 4,20")
        if most is not None and value > most:
            raise ConfigError(f"{option} {text!r}: {part.strip()} is too large: at most {most:,}")
        if int(value) in found:
            raise ConfigError(f"{option} {text!r}: {part.strip()} comes twice; name each once")
        found.append(int(value))
    return found


def grid(
    clients: str,
    dimension: str,
    *,
    byzantine: int | None,
    rounds: int,
    warm_up: int,
    processes: int | None,
    rule: str,
    epsilon: float | None,
    delta: float,
    load: Load,
    overrides: Sequence[str] = (),
) -> list[Setting]:
    """Every n with every d.

    Raises
    ------
    ConfigError
        A point is impossible; the message names the option.
    """
    if not (load.compute_s >= 0 and math.isfinite(load.compute_s)):
        raise ConfigError(f"--compute-s {load.compute_s}: expected a number of seconds, 0 or more")
    settings = list[Setting]()
    for n in numbers(clients, "--clients", most=MOST_CLIENTS):
        f = n // 5 if byzantine is None else byzantine
        if 2 * f >= n:
            raise ConfigError(f"--byzantine {f}: with --clients {n} expected at most {(n - 1) // 2}")
        held = min(n, MOST_PROCESSES) if processes is None else processes
        if held > n:
            raise ConfigError(f"--processes {held}: with --clients {n} expected at most {n}")
        settings += [
            Setting(n, d, f, rounds, warm_up, held, rule, epsilon, delta, load, tuple(overrides))
            for d in numbers(dimension, "--dimension", most=1 << 30)
        ]
    for setting in settings:
        setting.experiment()
    return settings


def refuse_too_large(setting: Setting) -> None:
    """Refuse what does not fit into this machine's memory, rather than have the system kill somebody.

    The parameter server holds n rows and about eight vectors; a client its momentum, its frames and the model.

    Raises
    ------
    ConfigError
        It does not fit.
    """
    vectors = setting.clients + 8 + 4 * setting.clients + setting.processes
    needed, there = vectors * setting.dimension * BYTES_OF_A_FLOAT, available_bytes()
    if there and needed > 0.9 * there:
        raise ConfigError(
            f"{setting.title()}: needs about {needed / 2**30:.1f} GiB on this machine, which has "
            f"{there / 2**30:.1f} GiB free; take fewer clients or a smaller dimension, or put the clients on other "
            "hosts (--listen)"
        )
