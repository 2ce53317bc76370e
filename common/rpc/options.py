"""Channel and server options, in one place so that both ends agree.

Keepalive needs all five settings: without ``http2.ping_timeout_ms`` a stopped peer is noticed only after a minute,
without ``http2.max_pings_without_data`` pings end after two, and a client that pings more often than the server allows
is cut off. ``so_reuseport`` is off, or two servers would share one port silently.

On the server every buffer has a bound. Its window does not grow with what a connection could carry (``bdp_probe``): a
stream that is not read could otherwise hold megabytes.
"""

from __future__ import annotations

from common.rpc.frames import FRAME_OVERHEAD

__all__ = ["WINDOW_BYTES", "channel_options", "largest_message", "server_options"]

Options = list[tuple[str, int]]

CONNECT_TIMEOUT_MS = 10_000
"""What gRPC calls the least time between attempts is how long one may take; between them is the initial backoff."""
LEAST_PING_INTERVAL_MS = 250
"""What a server puts up with; clients choose their own pace."""
IDLE_CONNECTION_MS = 60_000
PENDING_CALLS = 1_000
"""gRPC's own limit; it cancels some of the calls beyond it, and all beyond three times as many."""
WINDOW_BYTES = 256 * 1024
"""Bytes of a stream that may be on their way to the server before it asks for them."""
LARGEST_CHUNK_BYTES = 1 << 25
"""A client takes whatever chunks its server chose."""


def largest_message(chunk_bytes: int) -> int:
    """Bytes of a message beyond which it is refused.

    gRPC itself takes twice that: what it cuts off cannot be told from a connection that broke, and is not explained.
    """
    return chunk_bytes + FRAME_OVERHEAD


def _keepalive(keepalive_s: float, keepalive_timeout_s: float) -> Options:
    return [
        ("grpc.keepalive_time_ms", int(1000 * keepalive_s)),
        ("grpc.keepalive_timeout_ms", int(1000 * keepalive_timeout_s)),
        ("grpc.http2.ping_timeout_ms", int(1000 * keepalive_timeout_s)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def server_options(
    chunk_bytes: int,
    *,
    keepalive_s: float = 5.0,
    keepalive_timeout_s: float = 5.0,
    metadata_bytes: int = 8192,
    connections: int | None = None,
    streams_per_connection: int | None = None,
    pending: int = 0,
    handshake_s: float = 10.0,
) -> Options:
    """Options of the PS's server.

    Parameters
    ----------
    connections, streams_per_connection
        How many at once; a further connection is closed, a further stream waits at the client.
    pending
        Calls that no code of ours has heard of yet: so many may wait. Beyond 1,000, gRPC would begin to cancel them,
        and a thousand clients open more than that within a moment.
    handshake_s
        A connection that has not come up by then is closed.
    """
    limits = [
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_concurrent_streams", streams_per_connection),
    ]
    return [
        *_keepalive(keepalive_s, keepalive_timeout_s),
        ("grpc.max_receive_message_length", 2 * largest_message(chunk_bytes)),
        ("grpc.max_send_message_length", largest_message(chunk_bytes)),
        ("grpc.max_metadata_size", metadata_bytes),
        ("grpc.absolute_max_metadata_size", metadata_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", LEAST_PING_INTERVAL_MS),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.server.max_pending_requests", max(PENDING_CALLS, pending)),
        ("grpc.server.max_pending_requests_hard_limit", max(3 * PENDING_CALLS, pending)),
        ("grpc.server_handshake_timeout_ms", int(1000 * handshake_s)),
        ("grpc.http2.settings_timeout", int(1000 * handshake_s)),
        ("grpc.max_connection_idle_ms", IDLE_CONNECTION_MS),
        *((name, value) for name, value in limits if value is not None),
    ]


def channel_options(chunk_bytes: int, *, keepalive_s: float = 5.0, keepalive_timeout_s: float = 5.0) -> Options:
    """Options of a client's channel; our own retries replace gRPC's, which hide what happened."""
    return [
        *_keepalive(keepalive_s, keepalive_timeout_s),
        ("grpc.max_receive_message_length", largest_message(max(chunk_bytes, LARGEST_CHUNK_BYTES))),
        ("grpc.max_send_message_length", 2 * largest_message(max(chunk_bytes, LARGEST_CHUNK_BYTES))),
        ("grpc.max_metadata_size", 64 * 1024),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.use_local_subchannel_pool", 1),
    ]
