"""One typed, frozen configuration for everything: the experiment.

An experiment is a TOML file. Every process of a run starts from its own copy; the values that must agree between
them are the *public* ones (:meth:`Experiment.public`). Unknown keys are refused with the nearest known one.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from common.errors import ConfigError
from common.schedules import Schedule, parse_schedule

__all__ = [
    "SCHEDULE",
    "Aggregation",
    "Attack",
    "Client",
    "Data",
    "Evaluation",
    "Experiment",
    "Federation",
    "Misbehaviour",
    "Model",
    "Monitoring",
    "Network",
    "Privacy",
    "Tls",
    "Training",
    "digest_of",
    "load_experiment",
    "named_toml",
    "ready_experiments",
]


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("expected a finite number")
    return value


Number = Annotated[float, AfterValidator(_finite)]
Positive = Annotated[float, Field(gt=0), AfterValidator(_finite)]
Fraction01 = Annotated[float, Field(ge=0, lt=1), AfterValidator(_finite)]
NonNegative = Annotated[float, Field(ge=0, le=1e30), AfterValidator(_finite)]


def _none(value: Any) -> Any:
    """TOML has no null: "none" stands for it."""
    return None if value == "none" else value


def _spelled(value: float | None) -> float | str:
    return "none" if value is None else value


ScheduleField = Annotated[Schedule, BeforeValidator(parse_schedule)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)


class _OpenSection(_Section):
    """A section that also carries the parameters of what it names (a rule, an attack); these are checked there."""

    model_config = ConfigDict(extra="allow")
    reserved: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="after")
    def _no_reserved_keys(self) -> _OpenSection:
        for key, value in self.parameters.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{key} = {value!r}: expected a finite number")
            if key in self.reserved:
                raise ValueError(
                    f"{key} is set elsewhere in the experiment, not among a rule's or an attack's own keys"
                )
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Federation(_Section):
    """Who takes part."""

    clients: int = Field(ge=1, le=100_000, description="n: identities on the public roster, adversaries included")
    byzantine: int = Field(default=0, ge=0, description="f: how many Byzantine identities the PS tolerates")
    clients_per_process: int = Field(default=1, ge=1, description="logical clients held by one client process")
    quorum: int | None = Field(default=None, ge=1, description="answers a round needs; default max(2f + 1, 0.8 n)")
    weights: Literal["equal", "samples"] | tuple[NonNegative, ...] = Field(
        default="equal", description="public weight of each identity, for rules that take weights; or sample counts"
    )

    @model_validator(mode="after")
    def _quorum_fits(self) -> Federation:
        if self.byzantine >= self.clients:
            raise ValueError(f"byzantine = {self.byzantine} must be smaller than clients = {self.clients}")
        if self.quorum is not None and self.quorum > self.clients:
            raise ValueError(f"quorum = {self.quorum} exceeds clients = {self.clients}")
        if isinstance(self.weights, tuple) and len(self.weights) != self.clients:
            raise ValueError(
                f"weights has {len(self.weights)} entries: expected one for each of {self.clients} clients"
            )
        return self

    @property
    def needed(self) -> int:
        """The quorum in force."""
        if self.quorum is not None:
            return self.quorum
        return min(self.clients, max(2 * self.byzantine + 1, math.ceil(0.8 * self.clients)))


class ScheduleSection(_Section):
    """Schedules that replace the constants of ``[training]``."""

    learning_rate: ScheduleField | None = None
    client_momentum: ScheduleField | None = None
    server_momentum: ScheduleField | None = None


class Training(_Section):
    """The algorithm's hyper-parameters (Algorithm 1 of the ByzULDP paper)."""

    rounds: int = Field(ge=1, le=10_000_000, description="T")
    batch_size: int = Field(default=20, ge=1)
    learning_rate: Positive = Field(default=0.1, description="η")
    clip_norm: Annotated[Positive | None, BeforeValidator(_none), PlainSerializer(_spelled)] = Field(
        default=1.0, description="C: L2 norm a client's gradient is clipped to; 'none' for no clipping"
    )
    client_momentum: Fraction01 = Field(default=0.9, description="α")
    server_momentum: Fraction01 = Field(default=0.9, description="β")
    server_momentum_form: Literal["outside", "inside"] = Field(
        default="outside", description="on the released aggregate, or inside the rule as in the paper"
    )
    schedule: ScheduleSection = ScheduleSection()
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="where the PS aggregates")
    seed: int = Field(default=0, ge=0, lt=2**63)

    def schedule_of(self, quantity: Literal["learning_rate", "client_momentum", "server_momentum"]) -> Schedule:
        """The schedule in force; momenta are clamped to [0, 1)."""
        chosen: Schedule | None = getattr(self.schedule, quantity)
        if chosen is None:
            chosen = parse_schedule(getattr(self, quantity))
        return chosen if quantity == "learning_rate" else chosen.clamped()


class Evaluation(_Section):
    """How the public test set is used; never in the round's critical path."""

    every: int = Field(default=10, ge=1, description="rounds between evaluations")
    last: int = Field(default=50, ge=1, description="rounds averaged in accuracy_last")
    images: int | None = Field(default=None, ge=1, description="test images used along the way; default all")


class Aggregation(_OpenSection):
    """The robust rule; further keys are the rule's own parameters."""

    reserved = frozenset({"name", "num_byzantine", "folders"})
    rule: str = Field(default="trimmed_mean", min_length=1)


class Privacy(_Section):
    """User-level differential privacy; without ``epsilon`` there is none."""

    epsilon: Positive | None = None
    delta: float = Field(default=1e-5, gt=0, lt=1)
    calibration: Literal["exact", "renyi"] = "exact"
    premise: Literal["independent", "strict"] = Field(
        default="independent", description="strict: the claim holds even if adversaries read honest momenta"
    )
    round_timing: Literal["adaptive", "fixed"] = Field(
        default="adaptive", description="fixed: rounds close and publish on a public schedule"
    )
    missing: Literal["zero", "rescale"] = Field(
        default="zero", description="an absent identity is the zero momentum, or left out (needs one more premise)"
    )
    noise: Literal["gaussian", "discrete"] = Field(
        default="gaussian", description="discrete: an exact sampler on the grid, for small models; calibration renyi"
    )
    noise_seed: int | None = Field(default=None, ge=0, description="research only: marks the run not private")
    previous: tuple[Path, ...] = Field(
        default=(), description="earlier runs' folders, on the same identities: epsilon is for all of them together"
    )


class Attack(_OpenSection):
    """What the Byzantine identities (the last ``adversaries`` ids) do; further keys are the attack's parameters."""

    reserved = frozenset(
        {"num_clients", "num_byzantine", "num_adversaries", "clip_norm", "seed", "setting", "folders"}
        | {"honest", "own", "round_id", "theta"}
    )
    name: str = Field(default="none", min_length=1)
    adversaries: int | None = Field(default=None, ge=0, description="how many; default f")
    knowledge: Literal["none", "colluding", "omniscient"] = "colluding"


class Misbehaviour(_OpenSection):
    """How the Byzantine identities abuse the protocol, whatever they send; further keys are its parameters."""

    reserved = frozenset({"ground", "folders"})
    name: str | tuple[str, ...] = Field(
        default="none", min_length=1, description="or a list of names, dealt to the identities in turn"
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Of all misbehaviours, without repetition."""
        given = (self.name,) if isinstance(self.name, str) else self.name
        return tuple(dict.fromkeys(name for name in given if name != "none"))


class Data(_Section):
    """Which data, and how it is dealt to the identities."""

    dataset: str = Field(default="mnist", min_length=1)
    root: Path | None = Field(default=None, description="a folder in torchvision's layout; default ./data")
    partition: Literal["classes", "shards", "iid", "dirichlet", "local"] = "classes"
    classes_per_client: int = Field(default=2, ge=1)
    shards_per_client: int = Field(default=2, ge=1)
    dirichlet_beta: Positive = 0.5
    minimum: int = Field(default=1, ge=1, description="samples every client has at least (dirichlet)")
    deal_to: Literal["all", "honest"] = "all"


class Model(_Section):
    """What is trained."""

    name: str = Field(default="cnn", min_length=1)
    init_from: Path | None = Field(default=None, description="a safetensors file with the initial parameters")
    l2: float = Field(default=0.0, ge=0, description="λ: λ/2 ‖θ‖² is added to every client's loss")
    frozen_buffers: bool = Field(default=False, description="running statistics stay as they are at the start")


class Tls(_Section):
    """Certificates: with them every connection is encrypted, and both of its ends are known. One process's own.

    ``{id}`` in ``certificate`` and ``key`` stands for a client's id: a process has a certificate for each identity it
    holds.
    """

    ca: Path | None = Field(default=None, description="PEM file of the authorities whose certificates are accepted")
    certificate: str | None = Field(default=None, min_length=1, description="PEM file; {id} is a client's id")
    key: str | None = Field(default=None, min_length=1, description="PEM file of its private key; {id} as above")
    server_name: str | None = Field(
        default=None, min_length=1, description="clients: the name in the PS's certificate; default the address's host"
    )
    roster: Path | None = Field(
        default=None, description="PS: TOML file of who may join; default all with certificates"
    )
    revoked: Path | None = Field(default=None, description="PS: file of revoked serial numbers, one a line")

    @model_validator(mode="after")
    def _whole(self) -> Tls:
        missing = [name for name in ("ca", "certificate", "key") if getattr(self, name) is None]
        if 0 < len(missing) < 3:
            raise ValueError(f"{' and '.join(missing)} missing: TLS needs ca, certificate and key")
        if missing and (self.roster or self.revoked or self.server_name):
            raise ValueError("roster, revoked and server_name go with ca, certificate and key")
        return self

    @property
    def enabled(self) -> bool:
        return self.ca is not None


class Network(_Section):
    """Addresses, deadlines and sizes. Every wait has one of these as its end."""

    address: str = Field(default="127.0.0.1:0", description="host:port; port 0 lets the system choose")
    insecure: bool = Field(default=False, description="allow an address beyond loopback without TLS")
    join_deadline_s: Positive = Field(default=120.0, description="for all clients to join, before round 0")
    join_grace_s: Positive = Field(default=15.0, description="once n - f have joined: for the others, at least")
    round_deadline_s: Positive = Field(default=60.0, description="for a round to collect its momenta")
    throughput_floor: Positive = Field(default=1e6, description="bytes/s; lengthens the round deadline of big models")
    grace_factor: Positive = Field(default=1.0, description="after the quorum answered: wait this multiple of its time")
    grace_floor_s: Positive = Field(default=0.5, description="the grace is at least this long")
    patience_s: float = Field(
        default=3.0,
        ge=0,
        allow_inf_nan=False,
        description="waiting that one identity may cost before it is waited for no more",
    )
    round_period_s: Positive = Field(default=10.0, description="round_timing = fixed: from one model to the next")
    publish_margin_s: Positive = Field(default=2.0, description="round_timing = fixed: of which to make the model")
    quorum_deadline_s: Positive = Field(default=60.0, description="below the quorum, after the deadline, give up")
    rpc_deadline_s: Positive = Field(default=30.0, description="of a short call")
    first_message_s: Positive = Field(default=5.0, description="a stream says who it is within so long")
    heartbeat_s: Positive = 1.0
    liveness_s: Positive = Field(default=15.0, description="without a heartbeat for so long, a member is dead")
    server_gone_s: Positive = Field(default=300.0, description="a client gives up after so long without the PS")
    leave_deadline_s: Positive = Field(default=10.0, description="the PS waits for clients to hear the run's end")
    keepalive_s: float = Field(default=5.0, ge=0.5, description="a connection that is silent for so long is pinged")
    keepalive_timeout_s: Positive = Field(default=5.0, description="without an answer for so long, it is given up")
    chunk_bytes: int = Field(default=1 << 20, ge=1 << 10, le=1 << 25)
    max_model_bytes: int = Field(default=4 << 30, ge=4)
    max_metadata_bytes: int = Field(default=8 << 10, ge=1 << 10, le=1 << 20, description="of one call")
    max_clients: int = Field(default=10_000, ge=1, description="a larger federation is not served")
    max_streams_per_client: int = Field(default=8, ge=3, description="calls that an identity may have open at once")
    max_streams_per_connection: int = Field(default=256, ge=4, description="further ones wait at the client")
    max_strangers: int | None = Field(
        default=None, ge=1, description="open calls that have not shown whose they are; default 64 and two a client"
    )
    max_connections: int | None = Field(default=None, ge=1, description="default 64 and two a client")
    max_memory_bytes: int | None = Field(
        default=None, ge=1, description="the PS does not start if it could need more (docs/limits.md)"
    )
    strikes: int = Field(
        default=3, ge=0, description="breaches of the protocol after which an identity is suspended; 0: never"
    )
    strike_window_s: Positive = Field(default=60.0, description="strikes older than this are forgotten")
    suspension_s: Positive = Field(default=30.0, description="for so long a suspended identity is out")
    max_repeats: int = Field(default=16, ge=1, description="of a complete momentum, by its identity, in a round")
    max_joins: int = Field(default=10, ge=1, description="of an identity, one after the other; see join_every_s")
    join_every_s: Positive = Field(default=2.0, description="after max_joins, an identity may join once in so long")
    tls: Tls = Tls()

    def deadline_of_round(self, model_bytes: int, num_clients: int) -> float:
        """Seconds a round may collect: grows with the bytes that must travel both ways."""
        return self.round_deadline_s + 2 * model_bytes * num_clients / self.throughput_floor


class Client(_Section):
    """What an honest client keeps for itself; nobody else has a say in it."""

    persist_every: int = Field(default=10, ge=1, description="rounds between two writes of the client's state")
    lifetime_epsilon: Positive | None = Field(
        default=None, description="refuse a run that would exceed it, over all runs with this parameter server"
    )
    lifetime_delta: float = Field(default=1e-5, gt=0, lt=1)


class Monitoring(_Section):
    """Where the PS shows how the run goes (docs/monitoring.md)."""

    status: str = Field(
        default="127.0.0.1:0", description="host:port of the PS's status page; port 0: any free one; '' for none"
    )
    otlp: str = Field(default="", description="address of an OpenTelemetry collector that the PS sends spans to")


class Experiment(_Section):
    """The whole configuration of a run."""

    federation: Federation
    training: Training
    evaluation: Evaluation = Evaluation()
    aggregation: Aggregation = Aggregation()
    privacy: Privacy = Privacy()
    attack: Attack = Attack()
    misbehaviour: Misbehaviour = Misbehaviour()
    data: Data = Data()
    model: Model = Model()
    network: Network = Network()
    client: Client = Client()
    monitoring: Monitoring = Monitoring()
    folder: Path | None = Field(default=None, description="the experiment file's: a user's own modules lie there")

    @model_validator(mode="after")
    def _sections_agree(self) -> Experiment:
        if self.num_adversaries > self.federation.clients:
            raise ValueError(
                f"attack.adversaries = {self.num_adversaries} exceeds federation.clients = {self.federation.clients}"
            )
        if self.data.deal_to == "honest" and self.num_adversaries == self.federation.clients:
            raise ValueError('data.deal_to = "honest" needs at least one honest client')
        privacy, network = self.privacy, self.network
        if privacy.epsilon is not None and privacy.delta * self.federation.clients >= 1:
            raise ValueError(
                f"privacy.delta = {privacy.delta:g} must be below 1/clients = {1 / self.federation.clients:g}: a "
                f"mechanism that gives one client away entirely would pass otherwise"
            )
        if privacy.epsilon is None and privacy.previous:
            raise ValueError("privacy.previous continues a budget: set privacy.epsilon for all the runs together")
        if privacy.noise == "discrete":
            if privacy.calibration != "renyi":
                raise ValueError(
                    'privacy.noise = "discrete" needs privacy.calibration = "renyi": the discrete Gaussian is zCDP, '
                    "and the exact formula is the continuous one's"
                )
            if privacy.noise_seed is not None:
                raise ValueError('privacy.noise = "discrete" has no seed: leave privacy.noise_seed out')
        if privacy.round_timing == "fixed":
            if privacy.epsilon is None:
                raise ValueError('privacy.round_timing = "fixed" is for private runs: set privacy.epsilon')
            if network.publish_margin_s < 0.1:
                raise ValueError(
                    f"network.publish_margin_s = {network.publish_margin_s:g}: expected at least 0.1 s, in which a "
                    "round is aggregated, noised and committed"
                )
            if network.publish_margin_s >= network.round_period_s:
                raise ValueError(
                    f"network.publish_margin_s = {network.publish_margin_s:g} must be smaller than "
                    f"network.round_period_s = {network.round_period_s:g}"
                )
        if privacy.premise == "strict":
            if privacy.round_timing != "fixed":
                raise ValueError('privacy.premise = "strict" needs privacy.round_timing = "fixed"')
            if privacy.missing != "zero":
                raise ValueError('privacy.premise = "strict" needs privacy.missing = "zero"')
            if self.num_adversaries > self.federation.byzantine:
                raise ValueError(
                    f'privacy.premise = "strict" covers f = {self.federation.byzantine} adversaries, not '
                    f"{self.num_adversaries}"
                )
        return self

    @property
    def num_adversaries(self) -> int:
        """Identities run by the adversary; the last ones on the roster."""
        if self.attack.name == "none" and not self.misbehaviour.names:
            return 0
        return self.federation.byzantine if self.attack.adversaries is None else self.attack.adversaries

    @property
    def adversary_ids(self) -> range:
        return range(self.federation.clients - self.num_adversaries, self.federation.clients)

    @property
    def honest_ids(self) -> range:
        return range(self.federation.clients - self.num_adversaries)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where a user's own modules (``module:name``) are looked for, beside the working directory."""
        return () if self.folder is None else (self.folder,)

    def public(self) -> dict[str, Any]:
        """The values every process must agree on, flat: ``section.key`` to a JSON value.

        The attack is not among them: an honest client has no say in it.
        """
        tree = self.model_dump(mode="json")
        private_keys = {
            "data.root",
            "model.init_from",
            "training.device",
            "federation.clients_per_process",
            "privacy.previous",
        }
        return {
            f"{section}.{key}": value
            for section in ("federation", "training", "aggregation", "privacy", "data", "model")
            for key, value in tree[section].items()
            if f"{section}.{key}" not in private_keys
        }

    def fingerprint(self) -> str:
        """SHA-256 of the public values (64 hex digits)."""
        return sha256(json.dumps(self.public(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def differences(self, public: dict[str, Any]) -> list[str]:
        """One sentence per public value that differs from another process's."""
        mine = self.public()
        return [
            f"{key} is {mine.get(key, 'unset')!r} here and {public.get(key, 'unset')!r} at the parameter server"
            for key in sorted(mine.keys() | public.keys())
            if mine.get(key) != public.get(key)
        ]


SCHEDULE = ("join_deadline_s", "round_period_s", "publish_margin_s")
"""Of ``[network]``: when rounds open, close and are published with ``privacy.round_timing = "fixed"``."""


def digest_of(configuration: Mapping[str, Any]) -> str:
    """SHA-256 (64 hex digits) of a whole configuration but for what may change later: its ``monitoring`` section, and
    its ``network`` section without the public schedule."""
    kept = {section: values for section, values in configuration.items() if section not in ("network", "monitoring")}
    kept["network"] = {key: configuration.get("network", {}).get(key) for key in SCHEDULE}
    return sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def ready_experiments() -> dict[str, Path]:
    """The experiments that ship with the project, by name; one in a folder is ``folder/name``.

    They are data of the ``deploy`` package, found without importing it.
    """
    root = Path(str(resources.files("deploy") / "experiments"))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in root.rglob("*.toml")}


def load_experiment(source: str | Path, overrides: Iterable[str] = ()) -> Experiment:
    """Read an experiment from a TOML file, or by the name of a ready one.

    Parameters
    ----------
    source
        A path, or a name such as ``mnist``.
    overrides
        ``section.key=value`` assignments; the value is TOML, or else taken as a string.

    Raises
    ------
    ConfigError
        The file is missing or not TOML, a key is unknown, or a value is out of range.
    """
    path, tree = named_toml("experiment", source, ready_experiments)
    tree = with_overrides(tree, overrides)
    tree.setdefault("folder", str(path.resolve().parent))
    return experiment_from(tree, where=str(path))


def named_toml(kind: str, source: str | Path, ready: Callable[[], Mapping[str, Path]]) -> tuple[Path, dict[str, Any]]:
    """A TOML file, by its path or as the ready one of a name: where it is, and what is in it.

    Parameters
    ----------
    kind
        What such a file is called.
    ready
        Asked for the ready ones by name, if there is no such file.

    Raises
    ------
    ConfigError
        The file is missing, cannot be read, or is not TOML.
    """
    path = Path(source)
    if not path.is_file():
        known = ready()
        if str(source) not in known:
            names = ", ".join(sorted(known)) or "(none)"
            raise ConfigError(f"no {kind} {str(source)!r}: give a TOML file's path or one of {names}")
        path = known[str(source)]
    try:
        return path, tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path} is not valid TOML: {problem}") from None
    except OSError as problem:
        raise ConfigError(f"{path} cannot be read: {problem.strerror}") from None


def with_overrides(tree: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A nested dictionary with ``section.key=value`` assignments applied (in place).

    Raises
    ------
    ConfigError
        An override is no assignment.
    """
    for override in overrides:
        _apply(tree, override)
    return tree


def experiment_from(tree: dict[str, Any], *, where: str = "the experiment") -> Experiment:
    """Validate a nested dictionary, as TOML or JSON gives it."""
    try:
        return Experiment.model_validate(tree)
    except ValidationError as problem:
        raise ConfigError(f"{where}:\n" + "\n".join(f"  {_explain(item)}" for item in problem.errors())) from None


def _apply(tree: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    parts = name.strip().split(".")
    if not separator or len(parts) < 2 or not all(parts):
        raise ConfigError(f"--set {override!r}: expected section.key=value, for instance training.rounds=20")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for part in parts[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {override!r}: {part} is a value, not a section")
    tree[parts[-1]] = value


def _explain(item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown key; {_nearest_key(item['loc'])}"
    if item["type"] == "missing":
        return f"{where}: missing"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "tuple_type":
        message = "expected a list, for instance [...]"
    given = item["input"]
    shown = "" if isinstance(given, dict) or not where else f"{where} = {given!r}: "
    return f"{shown}{message}" if shown else (f"{where}: {message}" if where else message)


def _nearest_key(location: tuple[str | int, ...]) -> str:
    section: type[BaseModel] = Experiment
    for part in location[:-1]:
        annotation = section.model_fields[str(part)].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            section = annotation
    known = list(section.model_fields)
    everywhere = {key: name for name, field in Experiment.model_fields.items() for key in _keys(field.annotation)}
    if str(location[-1]) in everywhere:
        return f"it belongs to [{everywhere[str(location[-1])]}]"
    if location[-1] in _DERIVED:
        return _DERIVED[str(location[-1])]
    close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known here: {', '.join(known)}"


_DERIVED = dict.fromkeys(
    ("noise_multiplier", "sigma", "z"), "it follows from epsilon, delta and rounds: `byzuldp privacy plan` shows it"
)


def _keys(annotation: Any) -> list[str]:
    return list(annotation.model_fields) if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []
