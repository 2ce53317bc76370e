"""The wiretap exists when an experiment asks for it, for its adversaries alone, and cannot be opened otherwise.

(That it shows the honest momenta, when, and that such a run is called not private: see ``test_servers.py``.)
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from federations import Child, ServerProcess, small_experiment
from fuzz_roles import serve_and_tell_modules
from google.protobuf.message import Message
from stock_client import CALL_S, Federation, StockClient

from common.rpc.methods import PARAMETER_SERVER, WIRETAP
from common.rpc.v1 import parameter_server_pb2 as pb
from common.rpc.v1 import wiretap_pb2 as tap
from common.rpc.v1.parameter_server_pb2_grpc import ParameterServerStub
from common.rpc.v1.wiretap_pb2_grpc import WiretapStub
from deploy.certs.folder import CertificateFolder

ROOT = Path(__file__).parents[2]
OMNISCIENT = {"name": "bit_flip", "knowledge": "omniscient"}
ADVERSARY = 4


def ports(pid: int) -> list[int]:
    """Where a process listens."""
    connections = psutil.Process(pid).net_connections("inet")
    return [found.laddr.port for found in connections if found.status == psutil.CONN_LISTEN]


# ---------------------------------------------------------------- where nobody asked for it


@pytest.mark.parametrize(
    ("attack", "exists"),
    [
        ({"name": "none", "knowledge": "omniscient"}, False),
        ({"name": "bit_flip", "knowledge": "omniscient", "adversaries": 0}, False),
        ({"name": "bit_flip", "knowledge": "colluding"}, False),
        ({"name": "bit_flip", "knowledge": "none"}, False),
        (OMNISCIENT, True),
    ],
    ids=["no attack", "no adversary", "colluding", "knowing nothing", "omniscient"],
)
def test_a_server_has_no_code_and_no_port_of_the_wiretap_but_for_an_omniscient_adversary(
    tmp_path: Path, attack: Mapping[str, Any], exists: bool
) -> None:
    experiment = small_experiment(attack=attack)
    with Child(tmp_path, "ps", serve_and_tell_modules, experiment, tmp_path / "run") as server:
        modules = server.wait_for("modules")["names"]
        assert "ps.service" in modules
        assert ("ps.wiretap" in modules) is exists
        assert len(ports(server.pid)) == 1 + exists
        assert (server.wait_for("listening")["wiretap"] is not None) is exists


def test_a_run_without_a_wiretap_does_not_get_one_when_it_goes_on(tmp_path: Path) -> None:
    """Whatever configuration a resumed run is given, it keeps its own."""
    with ServerProcess(small_experiment(), tmp_path) as first:
        first.listening()
        first.stop()
    resumed = ServerProcess(small_experiment(attack=OMNISCIENT), tmp_path, run_dir=first.run_dir, resume=True)
    with resumed as second:
        assert second.wiretap is None
        assert len(ports(second.pid)) == 1


def test_what_is_called_on_a_port_of_the_clients_is_in_the_protocol_and_no_wiretap(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.address) as channel:

        def is_there(path: str) -> bool:
            try:
                list(channel.stream_stream(path)(iter([b""]), timeout=CALL_S))
            except grpc.RpcError as problem:
                return bool(problem.code() is not grpc.StatusCode.UNIMPLEMENTED)
            return True

        methods = [method.name for method in pb.DESCRIPTOR.services_by_name["ParameterServer"].methods]
        assert all(is_there(f"/{PARAMETER_SERVER}/{name}") for name in methods)
        assert not is_there(f"/{WIRETAP}/Tap")
        assert not is_there(f"/{PARAMETER_SERVER}/Tap")
        assert not is_there("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")


def test_the_wiretap_is_made_in_one_place_under_its_one_condition() -> None:
    users = {
        str(path.relative_to(ROOT))
        for package in ("common", "ps", "client", "adversary", "deploy")
        for path in (ROOT / package).rglob("*.py")
        if "pb2" not in path.name and "WiretapService" in path.read_text(encoding="utf-8")
    }
    assert users == {"ps/main.py", "ps/wiretap.py"}
    tree = ast.parse((ROOT / "ps/main.py").read_text(encoding="utf-8"))
    conditions = [
        ast.unparse(node.test)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and any("WiretapService" in ast.unparse(inner) for inner in node.body)
    ]
    assert conditions == ["experiment.attack.knowledge == 'omniscient' and experiment.num_adversaries"]


# ---------------------------------------------------------------- who is let in, and to what


def tapped(channel: grpc.Channel, caller: pb.Caller, round_id: int, wait_s: float = 0.2) -> list[tap.TapHeader]:
    """The headers that come down, of momenta or of what else there is to say."""
    request = tap.TapRequest(caller=caller, round_id=round_id, wait_s=wait_s)
    messages = list(WiretapStub(channel).Tap(request, timeout=CALL_S))
    return [message.header for message in messages if message.HasField("header")]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A run whose last identity is omniscient."""
    experiment = small_experiment(attack=OMNISCIENT, network={"grace_floor_s": 60.0, "join_grace_s": 60.0})
    with ServerProcess(experiment, tmp_path_factory.mktemp("watched")) as process:
        yield process.listening()


@pytest.fixture
def everyone(watched: ServerProcess) -> Iterator[Federation]:
    members = Federation(watched)
    yield members
    members.close()


def test_only_adversaries_of_now_are_let_in_and_each_refusal_is_counted(
    watched: ServerProcess, everyone: Federation
) -> None:
    *honest, adversary = everyone.clients
    before, former = watched.refusals(), pb.Caller.FromString(adversary.caller.SerializeToString())
    adversary.join()
    elsewhere = pb.Caller(run_id="another", client_id=ADVERSARY, incarnation=adversary.caller.incarnation)
    mine_as_his = pb.Caller(run_id=watched.run_id, client_id=ADVERSARY, incarnation=honest[0].caller.incarnation)
    callers = {
        "honest": honest[0].caller,
        "former": former,
        "elsewhere": elsewhere,
        "an honest one's incarnation": mine_as_his,
        "unknown": pb.Caller(run_id=watched.run_id, client_id=99, incarnation=bytes(16)),
        "nobody": pb.Caller(),
    }
    with grpc.insecure_channel(watched.wiretap) as channel:
        kinds = {who: [header.refusal.kind for header in tapped(channel, caller, 0)] for who, caller in callers.items()}
        assert tapped(channel, adversary.caller, 0)[0].HasField("not_yet")
    assert kinds == {
        "honest": [pb.NOT_A_MEMBER],
        "former": [pb.SUPERSEDED],
        "elsewhere": [pb.WRONG_RUN],
        "an honest one's incarnation": [pb.NOT_A_MEMBER],
        "unknown": [pb.UNKNOWN_CLIENT],
        "nobody": [pb.WRONG_RUN],
    }
    counted = watched.refusals() - before
    assert {name: counted[name] for name in ("not_a_member", "superseded", "wrong_run", "unknown_client")} == {
        "not_a_member": 2, "superseded": 1, "wrong_run": 2, "unknown_client": 1,
    }  # fmt: skip


def test_the_last_honest_client_that_is_alive_opens_it(watched: ServerProcess, everyone: Federation) -> None:
    *honest, adversary = everyone.clients
    round_id = adversary.pull()[0].model.round_id
    rows = everyone.rows(round_id) / 10
    with grpc.insecure_channel(watched.wiretap) as channel:
        for client in honest[:3]:
            assert tapped(channel, adversary.caller, round_id)[0].HasField("not_yet")
            client.push_accepted(round_id, rows[client.client_id])
        adversary.push_accepted(round_id, rows[ADVERSARY])
        assert tapped(channel, adversary.caller, round_id)[0].not_yet.round_id == round_id
        honest[3].leave()
        shown = tapped(channel, adversary.caller, round_id, wait_s=CALL_S / 2)
    assert [header.tapped.client_id for header in shown] == [0, 1, 2]
    assert {header.tapped.round_id for header in shown} == {round_id}


# ---------------------------------------------------------------- certificates


@contextmanager
def as_one_of(made: CertificateFolder, client_id: int, address: str) -> Iterator[grpc.Channel]:
    """A connection with an identity's certificate."""
    certificate, key = made.client(client_id)
    credentials = grpc.ssl_channel_credentials(
        made.authorities.read_bytes(), key.read_bytes(), certificate.read_bytes()
    )
    with grpc.secure_channel(address, credentials) as channel:
        yield channel


def test_over_tls_the_wiretap_asks_for_the_same_certificates(tmp_path: Path) -> None:
    made = CertificateFolder(tmp_path / "certs")
    made.begin(2.0)
    made.make_server([], 1.0, renew=False)
    made.make_clients(range(2), 1.0, renew=False)
    certificate, key = made.server
    experiment = small_experiment(
        federation={"clients": 2, "byzantine": 1, "quorum": 1},
        attack=OMNISCIENT,
        network={
            "tls": {"ca": made.authorities, "certificate": str(certificate), "key": str(key)},
            "grace_floor_s": 60.0,
        },
    )
    with ServerProcess(experiment, tmp_path) as server:
        wiretap = server.wiretap
        assert wiretap is not None
        callers = {}
        for client_id in (0, 1):
            with as_one_of(made, client_id, server.address) as channel:
                request = StockClient(server, client_id).join_request(token="")
                joined = ParameterServerStub(channel).Join(request, timeout=CALL_S).joined
                callers[client_id] = pb.Caller(
                    run_id=joined.run_id, client_id=client_id, incarnation=joined.incarnation
                )
        with as_one_of(made, 0, server.address) as channel:
            theta = np.zeros(server.num_parameters, dtype=np.float32)
            honest = StockClient(server, 0)
            honest.caller, honest.stub = callers[0], ParameterServerStub(channel)
            honest.push_accepted(honest.pull()[0].model.round_id, theta)
            honest.close()

        def told(channel: grpc.Channel, caller: pb.Caller) -> Message:
            return tapped(channel, caller, 0, wait_s=CALL_S / 2)[0]

        with as_one_of(made, 1, wiretap) as channel:
            assert told(channel, callers[1]).tapped.client_id == 0
            assert told(channel, callers[0]).refusal.kind == pb.WRONG_CERTIFICATE
        with as_one_of(made, 0, wiretap) as channel:  # an honest client that has stolen the incarnation
            assert told(channel, callers[1]).refusal.kind == pb.WRONG_CERTIFICATE
            assert told(channel, callers[0]).refusal.kind == pb.NOT_A_MEMBER
        assert server.refusals()["wrong_certificate"] == 2
        for credentials in (None, grpc.ssl_channel_credentials(made.authorities.read_bytes())):
            secure = credentials is not None
            with grpc.secure_channel(wiretap, credentials) if secure else grpc.insecure_channel(wiretap) as channel:
                with pytest.raises(grpc.RpcError) as failed:
                    told(channel, callers[1])
                assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
