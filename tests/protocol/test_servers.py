"""Whole servers: where they listen, models larger than a message, noise, the end of a run, the wiretap."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from federations import ServerProcess, small_experiment, until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from stock_client import CALL_S, Federation, StockClient

from common.errors import AttackError, ServerUnreachable, exit_code_of
from common.rpc.methods import PARAMETER_SERVER
from common.rpc.options import largest_message
from common.rpc.v1 import parameter_server_pb2 as pb
from common.rpc.v1 import wiretap_pb2 as tap
from common.rpc.v1.wiretap_pb2_grpc import WiretapStub

# ---------------------------------------------------------------- addresses and folders


def assert_ends_with(process: ServerProcess, status: str, *words: str) -> None:
    """It gives up with a status of the tree, and a message that says these words."""
    assert process.exit_code() == exit_code_of(status), process.log()
    (error,) = process.events("error")
    assert error["status"] == status
    assert all(word in error["message"] for word in words), error["message"]


def test_two_servers_cannot_share_a_port(server: ServerProcess, tmp_path: Path) -> None:
    network = {"address": server.address}
    with ServerProcess(small_experiment(network=network), tmp_path) as second:
        assert_ends_with(second, "address_unavailable", server.address)


def test_two_servers_cannot_share_a_run_folder(server: ServerProcess, tmp_path: Path) -> None:
    with ServerProcess(server.experiment, tmp_path, run_dir=server.run_dir, resume=True) as second:
        assert_ends_with(second, "run_folder_in_use", str(server.run_dir))
    with ServerProcess(server.experiment, tmp_path / "again", run_dir=server.run_dir) as third:
        assert_ends_with(third, "run_folder_in_use", str(server.run_dir))


def test_an_address_beyond_loopback_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with ServerProcess(small_experiment(network={"address": "0.0.0.0:0"}), tmp_path) as process:
        assert_ends_with(process, "insecure_refused", "0.0.0.0", "--insecure")  # noqa: S104
        assert not process.run_dir.exists()


def test_an_address_beyond_loopback_is_served_when_that_is_asked_for_by_name(tmp_path: Path) -> None:
    experiment = small_experiment(network={"address": "0.0.0.0:0", "insecure": True})
    with ServerProcess(experiment, tmp_path) as process:
        assert process.listening().address.startswith("0.0.0.0:")
        assert process.stop()["status"] == "interrupted"


# ---------------------------------------------------------------- the summary


def test_the_summary_has_every_refusal_by_its_kind_and_says_that_nothing_was_private(tmp_path: Path) -> None:
    with ServerProcess(small_experiment(), tmp_path) as process:
        members = Federation(process.listening())
        round_id = members.fresh_round()
        rows, last = members.rows(round_id), members.clients[-1]
        last.push(round_id - 1, rows[-1])
        last.push(round_id, rows[-1], schema_hash=b"")
        last.push(round_id, rows[-1], schema_hash=b"?")
        last.try_to_join(token="?")  # noqa: S106
        last.try_to_join(client_id=17)
        last.push_accepted(round_id, np.full_like(rows[-1], np.nan))
        for member in members.clients:
            member.leave()
        members.close()
        summary = process.stop()
    assert summary["refusals"] == {
        "stale_round": 1,
        "wrong_schema": 2,
        "bad_token": 1,
        "unknown_client": 1,
        "non_finite": 1,
    }
    assert (summary["status"], summary["private"]) == ("interrupted", False)
    assert "privacy.epsilon" in summary["private_because"]
    assert summary["rounds"] == round_id
    assert summary["bytes_up"] == 5 * 4 * process.num_parameters  # the open round's are not recorded yet


# ---------------------------------------------------------------- with noise: an absent row is the zero momentum


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Trimmed mean and noise that can be repeated; three answers are enough."""
    experiment = small_experiment(
        federation={"quorum": 3},
        training={"rounds": 50, "clip_norm": 2.0},
        aggregation={"rule": "trimmed_mean"},
        privacy={"epsilon": 500.0, "delta": 1e-3, "noise_seed": 7},
        network={"round_deadline_s": 1.0},
    )
    with ServerProcess(experiment, tmp_path_factory.mktemp("noisy")) as process:
        yield process.listening()


@pytest.mark.parametrize("why", ["absent", "refused", "not_finite"])
def test_under_privacy_a_missing_row_is_the_zero_momentum_whatever_the_reason(noisy: ServerProcess, why: str) -> None:
    members = Federation(noisy)
    round_id = members.fresh_round()
    theta, rows, last = members.model(round_id), members.rows(round_id), members.clients[-1]
    if why == "refused":
        wrong = last.messages(round_id, rows[-1])
        wrong[-1].trailer.digest = bytes(16)
        assert last.send(wrong).refusal.kind == pb.CHECKSUM
    if why == "not_finite":
        assert last.push_accepted(round_id, np.full_like(rows[-1], np.inf)).non_finite
    members.push_all(round_id, rows, but=[last.client_id])
    rows[-1] = 0.0
    expected = recomputed(noisy, round_id, theta, rows)
    np.testing.assert_array_equal(members.model(round_id + 1), expected)
    rows[-1] = members.rows(round_id)[-1]
    assert not np.allclose(expected, recomputed(noisy, round_id, theta, rows), atol=1e-3)
    members.close()


def recomputed(server: ServerProcess, round_id: int, theta: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The next model by the pure functions, every identity counted as having answered."""
    import torch

    from common.learning.task import build_task
    from common.noise import SeededGaussian
    from ps.mechanism import opened
    from ps.privacy.released import Unreleased
    from ps.update import ServerState, advance, release

    training = server.experiment.training
    _, _, mechanism = opened(server.experiment, lambda: build_task(server.experiment).dataset.train.labels)
    matrix = torch.from_numpy(rows.copy())
    for row in matrix:
        mechanism.condition(row)
    noise = SeededGaussian(server.experiment.privacy.noise_seed).standard_normal(len(theta), round_id=round_id)
    released = release(mechanism, Unreleased(matrix), range(len(matrix)), noise)
    state = ServerState(round_id, torch.from_numpy(theta), torch.zeros(len(theta)))
    return advance(state, released, training.learning_rate, training.server_momentum).theta.numpy()


# ---------------------------------------------------------------- a model larger than a message


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """d = 100,000 in chunks of 4 KiB: twenty times what a message may hold."""
    experiment = small_experiment(
        data={"dataset": "tiny_task:wide_blobs"}, network={"chunk_bytes": 4096, "grace_floor_s": 30.0}
    )
    with ServerProcess(experiment, tmp_path_factory.mktemp("wide")) as process:
        yield process.listening()


@pytest.mark.parametrize("chunk_bytes", [4096, 1000, 4095])
def test_a_model_and_momenta_larger_than_a_message_travel_in_chunks(wide: ServerProcess, chunk_bytes: int) -> None:
    assert 4 * wide.num_parameters > 15 * largest_message(wide.experiment.network.chunk_bytes)
    members = Federation(wide)
    round_id = members.fresh_round(chunk_bytes)
    messages = members.clients[0].pull_messages(round_id)
    assert len(messages) > 90
    assert max(message.ByteSize() for message in messages) <= 4096 + 128
    theta, rows = members.model(round_id), members.rows(round_id)
    for client, row in zip(members.clients, rows, strict=True):
        assert client.send(client.messages(round_id, row, chunk_bytes=chunk_bytes)).HasField("accepted")
    members.assert_round_is_mean_of(round_id, theta, rows)
    members.close()


def test_heartbeats_pulls_and_health_are_served_while_uploads_run(wide: ServerProcess) -> None:
    members = Federation(wide)
    round_id = members.fresh_round(4096)
    rows, over, uploads = members.rows(round_id), threading.Event(), [0, 0, 0]

    def upload(index: int) -> None:
        client = members.clients[index]
        messages = client.messages(round_id, rows[index], chunk_bytes=2048)
        while not over.is_set():
            assert client.send(messages).HasField("accepted")
            uploads[index] += 1

    threads = [threading.Thread(target=upload, args=(index,)) for index in range(3)]
    stream = members.clients[4].attend(beat_s=0.05)
    health = health_pb2_grpc.HealthStub(members.clients[4].channel)
    for thread in threads:
        thread.start()
    try:
        until(lambda: min(uploads) > 0, "the uploads to be under way")
        waits = []
        for _ in range(5):
            asked_at = time.monotonic()
            health.Check(health_pb2.HealthCheckRequest(service=PARAMETER_SERVER), timeout=CALL_S)
            assert members.clients[4].pull(round_id)[0].model.round_id == round_id
            waits.append(time.monotonic() - asked_at)
        assert not stream.ended
    finally:
        over.set()
        for thread in threads:
            thread.join()
        stream.close()
        members.close()
    assert min(uploads) > 1
    assert sorted(waits)[2] < 2.0  # on two busy cores; an upload that blocked the server would hold them for seconds


# ---------------------------------------------------------------- the end of a run, and the wiretap


@pytest.fixture(scope="module")
def tapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """An omniscient adversary (identity 4) and three rounds."""
    experiment = small_experiment(
        training={"rounds": 3},
        attack={"name": "bit_flip", "knowledge": "omniscient"},
        privacy={"epsilon": 500.0, "delta": 1e-3},
        aggregation={"rule": "trimmed_mean"},
        network={"leave_deadline_s": 20.0},
    )
    with ServerProcess(experiment, tmp_path_factory.mktemp("tapped")) as process:
        yield process.listening()


def tapped_rows(
    server: ServerProcess, client: StockClient, round_id: int, wait_s: float = CALL_S / 2
) -> tuple[list[int], np.ndarray, tap.TapHeader]:
    """Whose momenta the wiretap shows, the momenta, and its last header."""
    with grpc.insecure_channel(server.wiretap) as channel:
        request = tap.TapRequest(caller=client.caller, round_id=round_id, wait_s=wait_s)
        messages = list(WiretapStub(channel).Tap(request, timeout=CALL_S))
    shown = [message for message in messages if message.header.HasField("tapped")]
    rows = np.array([np.frombuffer(message.payload, dtype="<f4") for message in shown])
    return [message.header.tapped.client_id for message in shown], rows, messages[-1].header


def test_the_wiretap_does_not_exist_unless_it_is_asked_for(server: ServerProcess, client: StockClient) -> None:
    assert server.wiretap is None
    with pytest.raises(grpc.RpcError) as failure:
        list(WiretapStub(client.channel).Tap(tap.TapRequest(caller=client.caller), timeout=CALL_S))
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_wiretap_is_not_on_the_clients_port(tapped: ServerProcess) -> None:
    assert tapped.wiretap not in (None, tapped.address)
    with grpc.insecure_channel(tapped.address) as channel, pytest.raises(grpc.RpcError) as failure:
        list(WiretapStub(channel).Tap(tap.TapRequest(), timeout=CALL_S))
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_wiretap_shows_adversaries_the_honest_momenta_once_all_are_there(tapped: ServerProcess) -> None:
    import torch

    from adversary.omniscience import Omniscient

    members = Federation(tapped)
    *honest, adversary = members.clients
    round_id = adversary.pull()[0].model.round_id
    rows = members.rows(round_id) / 10  # short enough not to be clipped
    for client in honest[:3]:
        client.push_accepted(round_id, rows[client.client_id])
    assert tapped_rows(tapped, adversary, round_id, wait_s=0.2)[2].not_yet.round_id == round_id
    for client in honest:
        refusal = tapped_rows(tapped, client, round_id)[2].refusal
        assert refusal.kind == pb.NOT_A_MEMBER
    stranger = StockClient(tapped, adversary.client_id)
    assert tapped_rows(tapped, stranger, round_id)[2].refusal.kind == pb.NOT_A_MEMBER
    stranger.close()

    knowledge = Omniscient(
        tapped.wiretap, lambda: {4: adversary.caller}, num_parameters=len(rows[0]), chunk_bytes=4096, wait_s=0.2
    )
    waiting = asyncio.create_task(knowledge.estimate(round_id, torch.full((1, len(rows[0])), 9.0)))
    await asyncio.sleep(0.6)  # longer than the wiretap waits in one call
    assert not waiting.done()
    await asyncio.to_thread(honest[3].push_accepted, round_id, rows[3])

    np.testing.assert_allclose((await waiting).numpy(), rows[:4], atol=2**-19)
    ids, shown, _ = tapped_rows(tapped, adversary, round_id)
    assert ids == [0, 1, 2, 3]
    np.testing.assert_allclose(shown, rows[:4], atol=2**-19)  # as they stand at the server: on its grid
    members.close()


async def test_an_adversary_whose_wiretap_does_not_answer_says_so_and_guesses_nothing(tapped: ServerProcess) -> None:
    import torch

    from adversary.omniscience import Omniscient

    dead = Omniscient("127.0.0.1:9", lambda: {4: pb.Caller()}, num_parameters=10, chunk_bytes=4096, wait_s=0.5)
    with pytest.raises(ServerUnreachable, match=r"wiretap at 127\.0\.0\.1:9"):
        await dead.estimate(0, torch.zeros(1, 10))
    refused = Omniscient(tapped.wiretap, lambda: {4: pb.Caller()}, num_parameters=10, chunk_bytes=4096, wait_s=0.5)
    with pytest.raises(AttackError, match="wrong_run"):
        await refused.estimate(0, torch.zeros(1, 10))


def test_when_the_run_is_over_everyone_is_told_whatever_they_ask(tapped: ServerProcess) -> None:
    members = Federation(tapped)
    streams = [client.attend() for client in members.clients]
    for round_id in range(members.clients[0].pull()[0].model.round_id, 3):
        for client, row in zip(members.clients, members.rows(round_id), strict=True):
            client.push(round_id, row)  # the first round may have some already
        if round_id < 2:
            members.model(round_id + 1)
    first = members.clients[0]
    finished = [stream.wait_for("run_finished") for stream in streams]
    assert {end.status for end in finished} == {"completed"}
    assert first.pull(3)[0].run_finished.status == "completed"
    assert first.push(2, members.rows(2)[0]).refusal.kind == pb.RUN_IS_OVER
    assert first.try_to_join().refusal.kind == pb.RUN_IS_OVER
    assert tapped_rows(tapped, members.clients[4], 2)[2].refusal.kind == pb.RUN_IS_OVER
    latecomer = first.attend()
    assert latecomer.wait_for("run_finished").status == "completed"

    over_at = time.monotonic()
    for client in members.clients:
        assert not client.leave().HasField("refusal")
    summary = tapped.finish()
    assert time.monotonic() - over_at < 10.0  # it waits for the members to leave, no longer
    for stream in (*streams, latecomer):
        stream.close()
    members.close()
    assert (summary["status"], summary["rounds"]) == ("completed", 3)
    assert summary["private"] is False
    assert "wiretap" in summary["private_because"]
    assert json.loads((tapped.run_dir / "summary.json").read_text()) == summary
