"""The formula for a server's memory, and what is refused at its start."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import Any

import pytest
from federations import small_experiment

from common.errors import ConfigError, ModelError
from common.rpc.options import channel_options, server_options
from ps.limits import Limits, limits_of, memory_of, options_of, refuse_beyond, with_descriptors

MIB, GIB = 1 << 20, 1 << 30
DOCUMENT = Path(__file__).parents[2] / "docs" / "limits.md"


def limits(clients: int = 20, **network: Any) -> Limits:
    experiment = small_experiment(network=network)
    return limits_of(experiment.network, clients)


def test_the_formula_is_the_documented_one() -> None:
    n, d, c = 100, 1_000_000, 1 << 20
    experiment = small_experiment(federation={"clients": n}, aggregation={"rule": "trimmed_mean"})
    streams = 8 * n + 64 + 2 * n
    expected = 4 * d * (n + 18) + streams * (2 * (c + 16 * 1024) + 320 * 1024) + 64 * MIB
    assert memory_of(experiment, d, limits_of(experiment.network, n)).total == expected


@pytest.mark.parametrize(
    "row", [line for line in DOCUMENT.read_text().splitlines() if re.match(r"\| [\d,]+ \| [\d,]+ \| \d", line)]
)
def test_the_documented_examples_are_what_the_function_says(row: str) -> None:
    clients, parameters, chunk, vectors, streams = (cell.strip() for cell in row.strip("|").split("|"))
    n, d = (int(cell.replace(",", "")) for cell in (clients, parameters))
    experiment = small_experiment(
        federation={"clients": n}, aggregation={"rule": "trimmed_mean"}, network={"chunk_bytes": int(size(chunk))}
    )
    memory = memory_of(experiment, d, limits_of(experiment.network, n))
    assert memory.inbox + memory.rule + memory.model == pytest.approx(size(vectors), rel=0.1)
    assert memory.streams == pytest.approx(size(streams), rel=0.05)


def size(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"KiB": 1024, "MiB": MIB, "GiB": GIB}[unit]


@pytest.mark.parametrize(
    ("rule", "before", "copies"),
    [("mean", None, 0), ("trimmed_mean", None, 0), ("krum", None, 2), ("trimmed_mean", ["bucketing"], 2)],
)
def test_a_rule_that_compares_or_transforms_rows_may_copy_them(
    rule: str, before: list[str] | None, copies: int
) -> None:
    aggregation = {"rule": rule} | ({} if before is None else {"before": before})
    experiment = small_experiment(aggregation=aggregation)
    memory = memory_of(experiment, 1000, limits_of(experiment.network, 5))
    assert memory.rule == copies * memory.inbox == copies * 20_000


def test_limits_follow_the_number_of_clients_unless_they_are_set() -> None:
    usual, chosen = limits(1000), limits(1000, max_strangers=7, max_connections=8, max_streams_per_client=3)
    assert (usual.strangers, usual.connections, usual.streams) == (2064, 2064, 10_064)
    assert (chosen.strangers, chosen.connections, chosen.streams) == (7, 8, 3007)
    assert usual.backstop > usual.streams  # so that it is us who say why


@pytest.mark.parametrize(
    ("network", "problem", "key"),
    [
        ({"max_clients": 4}, ConfigError, "network.max_clients = 4"),
        ({"max_model_bytes": 3999}, ModelError, "network.max_model_bytes = 3999"),
        ({"max_memory_bytes": 100 * MIB}, ConfigError, f"network.max_memory_bytes = {100 * MIB}"),
    ],
)
def test_too_much_is_refused_by_the_key_that_forbids_it(
    network: dict[str, int], problem: type[Exception], key: str
) -> None:
    with pytest.raises(problem, match=re.escape(key)):
        refuse_beyond(small_experiment(network=network), 1000)


def test_what_is_just_within_the_limits_is_not_refused() -> None:
    needed = refuse_beyond(small_experiment(), 1000).total
    network = {"max_clients": 5, "max_model_bytes": 4000, "max_memory_bytes": needed}
    assert refuse_beyond(small_experiment(network=network), 1000).total == needed


def test_as_many_files_may_be_open_as_connections_need(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[tuple[int, int]]()
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: given.append(both))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1_000_000))
    assert with_descriptors(limits(10)) is None
    assert given == []
    assert with_descriptors(limits(1000)) is None
    assert given == [(2064 + 128, 1_000_000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 2000))
    assert "ulimit -n" in str(with_descriptors(limits(1000)))
    assert given[-1] == (2000, 2000)


KEEPALIVE = (
    "grpc.keepalive_time_ms",
    "grpc.keepalive_timeout_ms",
    "grpc.http2.ping_timeout_ms",
    "grpc.http2.max_pings_without_data",
)


def test_keepalive_has_all_its_settings_on_both_sides_and_the_server_bears_the_clients_pace() -> None:
    network = small_experiment(network={"keepalive_s": 2.0, "keepalive_timeout_s": 3.0}).network
    server = dict(options_of(limits_of(network, 5), network))
    client = dict(channel_options(network.chunk_bytes, keepalive_s=2.0, keepalive_timeout_s=3.0))
    assert [server[key] for key in KEEPALIVE] == [client[key] for key in KEEPALIVE] == [2000, 3000, 3000, 0]
    least = server["grpc.http2.min_recv_ping_interval_without_data_ms"]
    assert least <= 1000 * small_experiment(network={"keepalive_s": 0.5}).network.keepalive_s
    assert client["grpc.keepalive_permit_without_calls"] == 1


def test_a_client_takes_any_chunk_that_a_server_may_choose() -> None:
    small, large = 1 << 10, 1 << 25
    taken = dict(channel_options(small))["grpc.max_receive_message_length"]
    assert taken >= dict(server_options(large))["grpc.max_send_message_length"]
