"""What peers can make the PS hold: how many of everything there may be, and the memory that this adds up to.

With n clients, d parameters, chunks of c bytes and s streams (calls) open at once, a PS that listens comes to need at
most ::

    M = 4 d (n + r n + 18)  +  s (2 (c + 16 KiB) + 320 KiB)  +  64 MiB

bytes more. The inbox has one row of d float32 a client. A rule that compares rows, or a step before it, takes r = 2
copies more, a coordinate-wise rule on plain rows r = 0. θ, R, the noise, the aggregate in double precision, what is
being written and what is being sent are at most 18 vectors. A stream holds what :attr:`Limits.bytes_per_stream` says,
and s is bounded. The last term is code that the first round loads. Nothing else grows with what peers do.
``docs/limits.md`` has this with its measurements, and what only a firewall can do.
"""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import ConfigError, ModelError
from common.rpc.options import WINDOW_BYTES, largest_message, server_options

if TYPE_CHECKING:
    from common.config import Experiment, Network

__all__ = ["Limits", "Memory", "limits_of", "memory_of", "options_of", "refuse_beyond", "with_descriptors"]

log = logging.getLogger("byzuldp.ps")

SPARE = 64
VECTORS = 18
"""Copies of the model (4 d bytes each) beside the inbox, at the worst moment of a round."""
STREAM_OVERHEAD_BYTES = 64 * 1024
LOADED_LATER_BYTES = 64 << 20
COORDINATE_WISE = ("mean", "weighted_mean", "trimmed_mean", "median", "meamed", "centered_clipping", "normalized_mean")
DESCRIPTORS_BESIDE = 128
"""Files, libraries and what else a process has open."""


@dataclass(frozen=True)
class Limits:
    """How many of everything peers may have open at one server."""

    clients: int
    streams_per_client: int
    strangers: int
    connections: int
    streams_per_connection: int
    chunk_bytes: int
    metadata_bytes: int

    @property
    def message_bytes(self) -> int:
        """A larger message is refused."""
        return largest_message(self.chunk_bytes)

    @property
    def streams(self) -> int:
        """Calls open at once: every identity has all it may have, and so have strangers."""
        return self.clients * self.streams_per_client + self.strangers

    @property
    def backstop(self) -> int:
        """What gRPC itself is told: more than this, so that whoever is refused is told why by us."""
        return self.streams + SPARE

    @property
    def bytes_per_stream(self) -> int:
        """What an open call holds at the worst: a message (or a chunk twice) that is stuck, and the window.

        A stream that sends holds the chunk that is not read and gRPC's copy of it; one that receives holds a message
        of which the end is missing, which gRPC lets be twice as large as ours.
        """
        return 2 * self.message_bytes + WINDOW_BYTES + STREAM_OVERHEAD_BYTES


def limits_of(network: Network, num_clients: int) -> Limits:
    """The limits as configured for n clients."""
    usual = SPARE + 2 * num_clients
    return Limits(
        clients=num_clients,
        streams_per_client=network.max_streams_per_client,
        strangers=network.max_strangers or usual,
        connections=network.max_connections or usual,
        streams_per_connection=network.max_streams_per_connection,
        chunk_bytes=network.chunk_bytes,
        metadata_bytes=network.max_metadata_bytes,
    )


@dataclass(frozen=True)
class Memory:
    """Bytes, beyond those of an idle process, at the worst."""

    inbox: int
    rule: int
    model: int
    streams: int
    code: int = LOADED_LATER_BYTES

    @property
    def total(self) -> int:
        return self.inbox + self.rule + self.model + self.streams + self.code

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_shown(size)}" for name, size in vars(self).items() if size)
        return f"{_shown(self.total)} ({parts})"


def memory_of(experiment: Experiment, num_parameters: int, limits: Limits) -> Memory:
    """The formula of this module for an experiment with d parameters."""
    vector = 4 * num_parameters
    inbox = vector * limits.clients
    aggregation = experiment.aggregation
    plain = aggregation.rule in COORDINATE_WISE and not getattr(aggregation, "before", None)
    return Memory(
        inbox=inbox,
        rule=0 if plain else 2 * inbox,
        model=VECTORS * vector,
        streams=limits.streams * limits.bytes_per_stream,
    )


def refuse_beyond(experiment: Experiment, num_parameters: int) -> Memory:
    """What the PS could need at the worst, if that is within the limits.

    Raises
    ------
    ConfigError
        There are more clients than ``network.max_clients``, or it could need more than ``network.max_memory_bytes``.
    ModelError
        The model is larger than ``network.max_model_bytes``.
    """
    network, n = experiment.network, experiment.federation.clients
    if n > network.max_clients:
        raise ConfigError(
            f"federation.clients = {n} exceeds network.max_clients = {network.max_clients}; raise it if this machine "
            "can serve so many"
        )
    if 4 * num_parameters > network.max_model_bytes:
        raise ModelError(
            f"the model has {num_parameters} parameters, {4 * num_parameters} bytes; network.max_model_bytes = "
            f"{network.max_model_bytes}"
        )
    memory = memory_of(experiment, num_parameters, limits_of(network, n))
    if network.max_memory_bytes is not None and memory.total > network.max_memory_bytes:
        raise ConfigError(
            f"the parameter server could need {memory}, and network.max_memory_bytes = {network.max_memory_bytes}; "
            "lower network.chunk_bytes, network.max_streams_per_client or network.max_strangers, or raise it"
        )
    return memory


def with_descriptors(limits: Limits) -> str | None:
    """Let this process have as many files open as its connections need; a warning when the system does not."""
    wanted = limits.connections + DESCRIPTORS_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
        if possible < wanted:
            return (
                f"{possible} files may be open at once, and {limits.connections} connections "
                f"(network.max_connections) need {wanted}; raise `ulimit -n`"
            )
    return None


def options_of(limits: Limits, network: Network) -> list[tuple[str, int]]:
    """The gRPC options that hold these limits."""
    return server_options(
        limits.chunk_bytes,
        keepalive_s=network.keepalive_s,
        keepalive_timeout_s=network.keepalive_timeout_s,
        metadata_bytes=limits.metadata_bytes,
        connections=limits.connections,
        streams_per_connection=limits.streams_per_connection,
        pending=limits.backstop,
        handshake_s=network.first_message_s,
    )


def _shown(size: int) -> str:
    """``1.2 GiB``"""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
