"""Channel and server options, in one place so that both ends agree.

Keepalive needs all five settings: without ``http2.ping_timeout_ms`` a stopped peer is noticed only after a minute,
and a client that pings more often than the server allows is cut off. ``so_reuseport`` is off, or two servers would
share one port silently.
"""

from __future__ import annotations

from common.rpc.frames import FRAME_OVERHEAD

__all__ = ["channel_options", "server_options"]

Options = list[tuple[str, int]]

KEEPALIVE_MS = 5_000
KEEPALIVE_TIMEOUT_MS = 5_000
CONNECT_TIMEOUT_MS = 10_000
"""What gRPC calls the least time between attempts is how long one may take; between them is the initial backoff."""
MAX_METADATA_BYTES = 16 * 1024


def _common(chunk_bytes: int) -> Options:
    limit = chunk_bytes + FRAME_OVERHEAD
    return [
        ("grpc.max_receive_message_length", limit),
        ("grpc.max_send_message_length", limit),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def server_options(chunk_bytes: int) -> Options:
    """Options of the PS's server."""
    return [
        *_common(chunk_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ]


def channel_options(chunk_bytes: int) -> Options:
    """Options of a client's channel; our own retries replace gRPC's, which hide what happened."""
    return [
        *_common(chunk_bytes),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.use_local_subchannel_pool", 1),
    ]
