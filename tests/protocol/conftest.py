"""One parameter server for many tests: each takes a round of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from federations import ServerProcess, small_experiment
from stock_client import Federation, StockClient


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Of :data:`federations.SMALL`."""
    with ServerProcess(small_experiment(), tmp_path_factory.mktemp("server")) as process:
        yield process.listening()


@pytest.fixture
def federation(server: ServerProcess) -> Iterator[Federation]:
    """Everyone has joined, anew."""
    members = Federation(server)
    yield members
    members.close()


@pytest.fixture
def round_id(federation: Federation) -> int:
    """A round nobody has answered yet."""
    return federation.fresh_round()


@pytest.fixture
def client(federation: Federation, round_id: int) -> StockClient:
    """The last member, who will misbehave."""
    return federation.clients[-1]
