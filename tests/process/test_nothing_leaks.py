"""What is not released does not get out: planted secrets are looked for in everything that a run makes public."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import ServerProcess, small_experiment, until
from listening_proxy import ListeningProxy
from made_run import make_run
from stock_client import Federation

from common.aggregation.step import condition_row
from common.rpc.v1 import parameter_server_pb2 as pb

CLIP_NORM, ROUNDS = 1.0, 4
SAID = "the-diagnosis-of-client-3"


class Through:
    """The server, as whoever comes through the proxy sees it."""

    def __init__(self, server: ServerProcess, proxy: ListeningProxy) -> None:
        self._server, self.address = server, proxy.address

    def __getattr__(self, name: str) -> object:
        return getattr(self._server, name)


class Run:
    """A finished run: what was sent to it, and everything that came of it."""

    def __init__(self, folder: Path) -> None:
        experiment = small_experiment(
            privacy={"epsilon": 5.0, "delta": 1e-3},
            training={"clip_norm": CLIP_NORM, "rounds": ROUNDS, "server_momentum": 0.0},
            federation={"quorum": 4},
            evaluation={"every": 1},
        )
        with ServerProcess(experiment, folder) as server:
            proxy = ListeningProxy(server.listening().address)
            federation = Federation(Through(server, proxy))
            attendance = federation.clients[3].attend()
            attendance.send(
                pb.AttendRequest(error=pb.ClientError(client_id=3, round_id=0, kind="ValueError", message=SAID))
            )
            until(lambda: SAID in server.log(), "the error to reach the server")
            self.rows = {}
            for round_id in range(ROUNDS):
                header, _ = federation.clients[0].pull(round_id)
                assert header.model.round_id == round_id
                # The last client is silent in one round, and sends what cannot be counted in another.
                self.rows[round_id] = rows = 3 * federation.rows(round_id)
                silent = (4,) if round_id == 1 else ()
                if round_id == 2:
                    rows[4, 0] = np.nan
                federation.push_all(round_id, rows, but=silent)
                rows[list(silent)] = 0
            federation.clients[0].pull_messages(ROUNDS)
            attendance.close()
            federation.close()
            self.summary = server.finish()
            proxy.close()
            self.run_dir, self.up, self.down = server.run_dir, bytes(proxy.up), bytes(proxy.down)
            self.log = server.log().encode()
            self.events = b"".join(path.read_bytes() for path in folder.glob("*.jsonl"))

    def secrets(self) -> dict[str, bytes]:
        """What must stay inside: momenta as they came and as they counted, aggregates before noise, norms, words."""
        found = {"what a client said": SAID.encode()}
        for round_id, rows in self.rows.items():
            counted = torch.from_numpy(rows.copy())
            for client_id, row in enumerate(rows):
                name = f"client {client_id}, round {round_id}"
                condition_row(counted[client_id], CLIP_NORM)
                if np.isfinite(row).all() and row.any():
                    found[f"momentum of {name}"] = row.astype("<f4").tobytes()
                    found[f"counted momentum of {name}"] = counted[client_id].numpy().astype("<f4").tobytes()
                    norm = float(np.linalg.norm(row.astype(np.float64)))
                    found[f"norm of {name} in words"] = f"{norm:.6g}".encode()
                    found[f"norm of {name} in float64"] = struct.pack("<d", norm)
            total = counted.numpy().astype(np.float64).sum(axis=0)
            for kind, values in (("sum", total), ("mean", total / len(rows))):
                found[f"{kind} of round {round_id} in float64"] = values.astype("<f8").tobytes()
                found[f"{kind} of round {round_id} in float32"] = values.astype("<f4").tobytes()
        return found

    def public(self) -> dict[str, bytes]:
        """What anybody may see: the public folder and every byte that clients were sent."""
        files = {path.name: path.read_bytes() for path in (self.run_dir / "public").rglob("*") if path.is_file()}
        assert {"summary.json", "model.safetensors"} <= set(files)
        return files | {"sent to the clients": self.down}

    def stored(self) -> dict[str, bytes]:
        """The other files of the run folder."""
        public = self.run_dir / "public"
        return {
            str(path.relative_to(self.run_dir)): path.read_bytes()
            for path in self.run_dir.rglob("*")
            if path.is_file() and public not in path.parents
        }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("leaks"))


def leaks(secrets: Mapping[str, bytes], outputs: Mapping[str, bytes]) -> list[str]:
    """Which secrets appear where; of a vector, any four of its entries in a row are enough."""
    return [
        f"{secret} in {output}"
        for secret, content in secrets.items()
        for output, data in outputs.items()
        if any(window in data for window in _windows(content))
    ]


def _windows(content: bytes) -> Iterator[bytes]:
    if len(content) <= 32:
        yield content
        return
    for start in range(0, len(content) - 16 + 1, 4):
        yield content[start : start + 16]


def test_the_search_finds_what_travels_to_the_server_and_what_only_the_operator_reads(run):
    secrets = run.secrets()
    found = leaks(secrets, {"sent by the clients": run.up})
    momenta = [name for name in secrets if name.startswith("momentum")]
    assert len(momenta) == 5 * ROUNDS - 2
    assert found == [*(f"{name} in sent by the clients" for name in ["what a client said", *momenta])]
    assert leaks({"what a client said": SAID.encode()}, {"log": run.log}) == ["what a client said in log"]


def test_the_search_finds_an_aggregate_that_was_released_without_noise(tmp_path):
    rows = torch.randn(5, 10, generator=torch.Generator().manual_seed(3))
    experiment = small_experiment(training={"rounds": 1, "clip_norm": "none"})
    folder = make_run(tmp_path / "run", experiment, rows=lambda _round_id, client_id: rows[client_id])
    mean = (rows.numpy().astype(np.float64).sum(axis=0) / 5).astype("<f4").tobytes()
    assert leaks({"mean": mean}, {"model": (folder / "models" / "model-1.safetensors").read_bytes()})


def test_nothing_public_holds_anything_that_was_not_released(run):
    assert run.summary["private"]
    assert leaks(run.secrets(), run.public()) == []


def test_the_run_folder_holds_no_tensor_that_was_not_released(run):
    tensors = {name: content for name, content in run.secrets().items() if len(content) > 32}
    assert tensors
    assert leaks(tensors, run.stored() | {"events": run.events, "log": run.log}) == []


def test_the_public_summary_says_nothing_of_who_answered_or_with_what(run):
    public = json.loads((run.run_dir / "public" / "summary.json").read_text())
    assert run.summary["refusals"] == {"client_error": 1, "non_finite": 1}
    words = json.dumps(public)
    for word in ("non_finite", "client_error", "answered", "missing", "latency", "bytes", "refusals", "seconds"):
        assert word not in words


def test_a_client_is_not_told_what_became_of_the_others(run):
    """The stock clients see model, round and head; the answer to a push says what became of that push alone."""
    fields = {field.name for field in pb.Model.DESCRIPTOR.fields}
    assert fields == {"round_id", "element_count", "schema_hash", "ledger_head"}
    assert {field.name for field in pb.Accepted.DESCRIPTOR.fields} == {"duplicate", "non_finite"}
