"""Flower's legacy gRPC server and its clients, with clients that return a constant and a trimmed mean.

Run by :mod:`latency` with its own interpreter, which then hands over to that of the peer's environment: one JSON object
a line on standard input, answers on standard output. Only what is Flower's public way of being used is used; a client
is the least that ``NumPyClient`` allows, and nothing is evaluated.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any

PYTHON = "BYZULDP_PEER_PYTHON"
"""Of the environment; the interpreter of the peer."""

Message = dict[str, Any]


def say(message: Message) -> None:
    os.write(_ANSWERS, (json.dumps(message) + "\n").encode())


def server(request: Message) -> None:
    """``rounds`` rounds of ``clients`` clients; says when each of them began, and what the process used."""
    import numpy as np
    from flwr.common import ndarrays_to_parameters
    from flwr.server import ServerConfig, start_server
    from flwr.server.strategy import FedTrimmedAvg

    clients, began = request["clients"], list[float]()

    class Timed(FedTrimmedAvg):
        def configure_fit(self, *arguments: Any, **named: Any) -> Any:
            began.append(time.perf_counter())
            return super().configure_fit(*arguments, **named)

    strategy = Timed(
        beta=request["byzantine"] / clients,
        fraction_fit=1.0,
        fraction_evaluate=0.0,
        min_fit_clients=clients,
        min_available_clients=clients,
        initial_parameters=ndarrays_to_parameters([np.zeros(request["d"], dtype=np.float32)]),
    )
    # The last round has no successor to end it.
    config = ServerConfig(num_rounds=request["rounds"] + 1)
    history = start_server(server_address=request["address"], config=config, strategy=strategy)
    say({"began": began, "cpu_s": time.process_time(), "rounds": len(began), "history": str(type(history).__name__)})


def client(request: Message) -> None:
    """One client: Flower has no room for two in a process, since each wants the process's signals."""
    import numpy as np
    from flwr.client import NumPyClient, start_client

    class Constant(NumPyClient):
        def __init__(self, vector: Any) -> None:
            self._vector = vector

        def get_parameters(self, config: Any) -> Any:  # noqa: ARG002 - as Flower calls it
            return [self._vector]

        def fit(self, parameters: Any, config: Any) -> Any:  # noqa: ARG002
            return [self._vector], 1, {}

    vector = np.random.default_rng(request["number"]).standard_normal(request["d"], dtype=np.float32)
    start_client(server_address=request["address"], client=Constant(vector).to_client(), insecure=True)
    say({"cpu_s": time.process_time()})


def main() -> None:
    request = json.loads(sys.stdin.readline())
    with contextlib.suppress(KeyboardInterrupt):
        {"server": server, "client": client}[request["be"]](request)


if __name__ == "__main__":
    if os.environ.get(PYTHON):
        python = os.environ.pop(PYTHON)
        os.execve(python, [python, __file__], {**os.environ, "FLWR_TELEMETRY_ENABLED": "0"})  # noqa: S606
    _ANSWERS = os.dup(1)  # whatever Flower prints is no answer
    os.dup2(2, 1)
    main()
