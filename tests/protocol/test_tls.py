"""TLS on real sockets: a federation trains over it, and every kind of wrong certificate is turned away by its cause.

One parameter server serves most of these tests: honest clients 0 to 3 train in a process of their own throughout,
identity 4 is the test's, and identity 5 is not in the roster file.
"""

from __future__ import annotations

import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from federations import Child, ServerProcess, adversary_process, client_process, small_experiment, until
from stock_client import StockClient
from typer.testing import CliRunner

from client.exchange import Exchange, Momentum, PublishedModel
from common.certificates import parse_certificates
from common.config import Experiment
from common.errors import ServerUnreachable, TlsRefused, exit_code_of
from common.rpc.addresses import Address, parse_address
from common.rpc.refusals import kind_name
from common.rpc.v1 import parameter_server_pb2 as pb
from common.rpc.v1.parameter_server_pb2_grpc import ParameterServerStub
from deploy import cli
from deploy.certs.folder import CertificateFolder
from deploy.certs.making import Authority, Pair, client_names, new_authority, server_names
from deploy.tls import Shown, examine
from ps.reader import RunReader

DAY = timedelta(days=1)
MINE = 4


@dataclass
class Secured:
    """A parameter server with TLS, the certificates around it, and the honest clients' process."""

    server: ServerProcess
    clients: Child
    made: CertificateFolder
    scratch: Path

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", parse_address(self.server.address).port)

    @property
    def authority(self) -> Authority:
        return Authority.from_pem(self.made.authorities.read_bytes(), (self.made.path / "ca.key").read_bytes())

    def rounds(self) -> int:
        return RunReader(self.server.run_dir).status().round_id

    def goes_on(self) -> None:
        """Two more rounds, with the honest clients' process alive."""
        reached = self.rounds()
        until(lambda: self.rounds() >= reached + 2, "the run to go on")

    def pair(self, client_id: int) -> Pair:
        certificate, key = self.made.client(client_id)
        return Pair(certificate.read_bytes(), key.read_bytes())

    def client(self, client_id: int, pair: Pair | None) -> Certified:
        return Certified(self, client_id, pair)

    def causes(self, pair: Pair | None, address: Address | None = None, **changes: Any) -> list[str]:
        """What ``byzuldp doctor --tls`` finds wrong."""
        shown = Shown(self.made.authorities, *self.files(pair), **changes)
        return [finding.cause for finding in examine(address or self.address, shown) if finding.cause]

    def files(self, pair: Pair | None) -> tuple[Path | None, Path | None]:
        if pair is None:
            return None, None
        certificate, key = self.scratch / "shown.pem", self.scratch / "shown.key"
        certificate.write_bytes(pair.certificate)
        key.write_bytes(pair.key)
        return certificate, key


class Certified(StockClient):
    """A stock client with a certificate, or without one."""

    def __init__(self, secured: Secured, client_id: int, pair: Pair | None) -> None:
        super().__init__(secured.server, client_id)
        self.channel.close()
        shown = (None, None) if pair is None else (pair.key, pair.certificate)
        credentials = grpc.ssl_channel_credentials(secured.made.authorities.read_bytes(), *shown)
        self.channel = grpc.secure_channel(
            str(secured.address), credentials, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self.stub = ParameterServerStub(self.channel)

    def __enter__(self) -> Certified:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def refused(self, **changes: Any) -> pb.Refusal:
        """A Join that is refused; no token unless a test gives one."""
        reply = self.try_to_join(**{"token": ""} | changes)
        assert reply.HasField("refusal"), reply
        return reply.refusal


def experiment_with(made: CertificateFolder, *, of: str, lists: bool = False, **sections: dict[str, Any]) -> Experiment:
    """A small experiment with the certificates ``of`` the server, or of the clients."""
    certificate, key = made.server if of == "server" else made.client("{id}")
    tls: dict[str, Any] = {"ca": made.authorities, "certificate": str(certificate), "key": str(key)}
    if lists:
        tls |= {"roster": made.roster, "revoked": made.revoked}
    network = sections.pop("network", {}) | {"tls": tls}
    return small_experiment(network=network, **sections)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    made = CertificateFolder(folder / "certs")
    made.begin(30.0)
    made.make_server([], 20.0, renew=False)
    made.make_clients(range(6), 20.0, renew=False)
    entry = made.roster.read_text().index("\n[[client]]\nid = 5\n")
    made.roster.write_text(made.roster.read_text()[:entry])
    sections: dict[str, Any] = {
        "federation": {"clients": 6, "byzantine": 2, "quorum": 2},
        "network": {"address": "0.0.0.0:0", "join_deadline_s": 0.3, "round_deadline_s": 0.5},
    }
    server = ServerProcess(experiment_with(made, of="server", lists=True, **sections), folder)
    with server as listening:
        address = f"127.0.0.1:{parse_address(listening.address).port}"
        experiment = experiment_with(made, of="client", **sections)
        with client_process(folder, experiment, address, dict.fromkeys(range(4), "")) as clients:
            yield Secured(server, clients, made, tmp_path_factory.mktemp("scratch"))


# ---------------------------------------------------------------- what works


def test_a_federation_trains_over_tls_beyond_loopback_and_without_tokens(secured: Secured) -> None:
    assert secured.server.address.startswith("0.0.0.0:")
    secured.goes_on()
    assert secured.causes(secured.pair(MINE)) == []


def test_a_token_is_not_needed_and_has_to_be_right_if_there_is_one(secured: Secured) -> None:
    with secured.client(MINE, secured.pair(MINE)) as client:
        assert client.refused(token="false").kind == pb.BAD_TOKEN  # noqa: S106
        for token in ("", secured.server.tokens()[MINE]):
            assert client.try_to_join(token=token).HasField("joined")


def test_a_run_ends_in_good_order_with_honest_clients_an_adversary_and_its_wiretap(tmp_path: Path) -> None:
    made = CertificateFolder(tmp_path / "certs")
    made.begin(2.0)
    made.make_server([], 1.0, renew=False)
    made.make_clients(range(4), 1.0, renew=False)
    sections: dict[str, Any] = {
        "federation": {"clients": 4, "byzantine": 1},
        "training": {"rounds": 3},
        "attack": {"name": "bit_flip", "knowledge": "omniscient"},
        "network": {"leave_deadline_s": 20.0},
    }
    with ExitStack() as processes:
        serving = experiment_with(made, of="server", **sections)
        server = processes.enter_context(ServerProcess(serving, tmp_path)).listening()
        experiment = experiment_with(made, of="client", **sections)
        assert experiment.fingerprint() == serving.fingerprint()
        taking_part = [
            client_process(tmp_path, experiment, server.address, dict.fromkeys((0, 1, 2), "")),
            adversary_process(tmp_path, experiment, server.address, {3: ""}, server.wiretap),
        ]
        for process in taking_part:
            processes.enter_context(process)
        assert [process.exit_code() for process in taking_part] == [0, 0], [each.log() for each in taking_part]
        summary = server.finish()
    assert (summary["status"], summary["rounds"], summary["refusals"]) == ("completed", 3, {})


# ---------------------------------------------------------------- a client's wrong certificate, in the handshake


def bad_client(secured: Secured, kind: str) -> Pair | None:
    now = datetime.now(UTC)
    match kind:
        case "missing":
            return None
        case "foreign":
            foreign = new_authority(2.0)
            return Authority.from_pem(foreign.certificate, foreign.key).issue("c", client_names(MINE), "client", 1.0)
        case "expired":
            return secured.authority.issue("c", client_names(MINE), "client", 1.0, now=now - 3 * DAY)
        case "not yet valid":
            return secured.authority.issue("c", client_names(MINE), "client", 9.0, now=now + DAY)
        case "wrong use":
            return secured.authority.issue("c", client_names(MINE), "server", 1.0)
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["missing", "foreign", "expired", "not yet valid", "wrong use"])
def test_a_client_is_turned_away_in_the_handshake_and_the_doctor_names_the_cause(secured: Secured, kind: str) -> None:
    pair, before = bad_client(secured, kind), secured.server.refusals()
    with secured.client(MINE, pair) as client, pytest.raises(grpc.RpcError) as failed:
        client.try_to_join()
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert set(secured.causes(pair)) == {kind}
    assert secured.server.refusals() == before  # no call of ours came about


def test_the_doctor_s_exit_code_and_words_are_the_causes(secured: Secured) -> None:
    certificate, key = secured.files(bad_client(secured, "expired"))
    words = ["doctor", "--tls", str(secured.address), "--tls-ca", str(secured.made.authorities)]
    result = CliRunner().invoke(cli.app, [*words, "--tls-cert", str(certificate), "--tls-key", str(key)])
    assert isinstance(result.exception, TlsRefused)
    assert exit_code_of("tls_refused") == result.exception.exit_code
    assert "EXPIRED" in result.output
    assert "it was valid until" in result.output
    good = CliRunner().invoke(
        cli.app,
        [*words, "--tls-cert", str(secured.made.client(MINE)[0]), "--tls-key", str(secured.made.client(MINE)[1])],
    )
    assert (good.exit_code, good.exception) == (0, None), good.output
    assert f"lets client {MINE} in" in good.output


# ---------------------------------------------------------------- a client's wrong certificate, at the gate


def wrong_for(secured: Secured, kind: str) -> tuple[int, Pair]:
    """Who asks to join, and with what."""
    match kind:
        case "another identity":
            return 0, secured.pair(MINE)
        case "no identity":
            return MINE, secured.authority.issue("c", server_names(["localhost"]), "client", 1.0)
        case "not on the roster":
            return 5, secured.pair(5)
        case "another fingerprint":
            return MINE, secured.authority.issue("c", client_names(MINE), "client", 1.0)
        case "revoked":
            pair = secured.authority.issue("c", client_names(MINE), "client", 1.0)
            with open(secured.made.revoked, "a") as file:
                file.write(f"{pair.facts.serial:x}\n")
            return MINE, pair
    raise AssertionError(kind)


AT_THE_GATE = {
    "another identity": ("wrong_certificate", "wrong identity", "expected the certificate of client 0, found the"),
    "no identity": ("wrong_certificate", "wrong identity", "which names no client"),
    "not on the roster": (
        "unknown_client",
        "not on the roster",
        "client 5 is not in the",
    ),
    "another fingerprint": ("wrong_certificate", "wrong identity", "its fingerprint is"),
    "revoked": ("revoked", "revoked", "has been revoked"),
}


@pytest.mark.parametrize("kind", AT_THE_GATE)
def test_a_certificate_is_refused_for_an_identity_by_name_counted_and_logged(secured: Secured, kind: str) -> None:
    refusal_kind, cause, words = AT_THE_GATE[kind]
    client_id, pair = wrong_for(secured, kind)
    with secured.client(client_id, pair) as client:
        if kind == "revoked":
            until(lambda: client.refused(fingerprint="").kind == pb.REVOKED, "the file to be read again")
        before = secured.server.refusals()
        refusal = client.refused()
        assert (kind_name(refusal.kind), words in refusal.message) == (refusal_kind, True), refusal
        assert secured.server.refusals() - before == {refusal_kind: 1}
        for call in (client.leave().refusal, client.pull()[0].refusal, client.push(0, np.zeros(1)).refusal):
            assert kind_name(call.kind) == refusal_kind
    assert words in secured.server.log()
    asked = {} if kind == "no identity" else {"client_id": client_id}
    assert secured.causes(pair, **asked) == [cause]


def test_an_identity_cannot_attend_or_speak_over_the_connection_of_another(secured: Secured) -> None:
    with secured.client(MINE, secured.pair(MINE)) as owner, secured.client(0, secured.pair(0)) as other:
        owner.join()
        other.caller = owner.caller  # its incarnation has leaked
        stream = other.attend()
        assert stream.wait_for("refusal").kind == pb.WRONG_CERTIFICATE
        stream.close()
        assert other.push(0, np.zeros(1)).refusal.kind == pb.WRONG_CERTIFICATE
        assert owner.push(10**6, np.zeros(secured.server.num_parameters)).refusal.kind == pb.FUTURE_ROUND


# ---------------------------------------------------------------- a server's wrong certificate


@contextmanager
def pretender(secured: Secured, pair: Pair) -> Iterator[Address]:
    """A server that is not ours, and shows this certificate."""
    credentials = grpc.ssl_server_credentials(
        [(pair.key, pair.certificate)], secured.made.authorities.read_bytes(), require_client_auth=True
    )
    server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield Address("127.0.0.1", port)
    finally:
        server.stop(0).wait()


def bad_server(secured: Secured, kind: str) -> Pair:
    now, here = datetime.now(UTC), server_names(["127.0.0.1"])
    match kind:
        case "foreign":
            foreign = new_authority(2.0)
            return Authority.from_pem(foreign.certificate, foreign.key).issue("s", here, "server", 1.0)
        case "expired":
            return secured.authority.issue("s", here, "server", 1.0, now=now - 3 * DAY)
        case "wrong use":
            return secured.authority.issue("s", here, "client", 1.0)
        case "wrong name":
            return secured.authority.issue("s", server_names(["elsewhere.example", "10.9.8.7"]), "server", 1.0)
    raise AssertionError(kind)


GRPC_SAYS = {
    "foreign": "unable to get local issuer certificate",
    "expired": "certificate has expired",
    "wrong use": "unsupported certificate purpose",
    "wrong name": "Hostname Verification Check failed",
}


@pytest.mark.parametrize("kind", GRPC_SAYS)
async def test_a_client_does_not_talk_to_a_server_with_a_wrong_certificate(secured: Secured, kind: str) -> None:
    with pretender(secured, bad_server(secured, kind)) as address:
        findings = list(examine(address, Shown(secured.made.authorities, *secured.made.client(MINE))))
        assert [finding.cause for finding in findings if finding.cause] == [kind]
        if kind == "wrong name":
            assert "expected 127.0.0.1, found elsewhere.example, 10.9.8.7" in findings[-1].text
        else:
            assert "the certificate of " in findings[-1].text
        exchange = Exchange(
            experiment_with(secured.made, of="client", network={"server_gone_s": 0.05}),
            address=str(address),
            tokens={MINE: ""},
            schema_hash=b"",
            num_parameters=1,
            produce=_nothing,
        )
        with pytest.raises(ServerUnreachable) as gone:
            await exchange.run()
    assert GRPC_SAYS[kind] in str(gone.value)
    assert f"byzuldp doctor --tls {address}" in str(gone.value)


async def _nothing(_model: PublishedModel) -> AsyncIterator[tuple[int, Momentum]]:
    for pair in ():
        yield pair


def test_the_name_expected_can_be_another_than_the_address(secured: Secured) -> None:
    assert secured.causes(secured.pair(MINE), server_name="localhost") == []
    assert secured.causes(secured.pair(MINE), server_name="ps.example") == ["wrong name"]


def test_the_doctor_says_when_there_is_no_tls_or_nobody(secured: Secured, server: ServerProcess) -> None:
    assert secured.causes(secured.pair(MINE), parse_address(server.address)) == ["no TLS"]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = Address("127.0.0.1", probe.getsockname()[1])
    assert secured.causes(secured.pair(MINE), free) == ["unreachable"]


# ---------------------------------------------------------------- while a run goes on


def shown_now(secured: Secured) -> int:
    """The serial number of the certificate that a new connection sees."""
    pem = ssl.get_server_certificate((secured.address.host, secured.address.port))
    return parse_certificates(pem.encode())[0].serial


def test_the_servers_certificate_and_the_authorities_are_renewed_during_a_run(secured: Secured, tmp_path: Path) -> None:
    """New connections see the new ones; those that are open stay, and nobody joins again."""
    evicted, first = secured.server.refusals()["evicted"], shown_now(secured)
    made = CertificateFolder(tmp_path / "next")
    shutil.copytree(secured.made.path, made.path)
    made.add_authority(20.0)
    renewed = made.make_server([], 10.0, renew=True)
    secured.made.server[1].write_bytes(made.server[1].read_bytes())  # without its certificate: half of a renewal
    assert shown_now(secured) == first
    assert "what was read before stays in force" in secured.server.log()
    secured.made.authorities.write_bytes(made.authorities.read_bytes())
    secured.made.server[0].write_bytes(made.server[0].read_bytes())
    assert renewed is not None
    assert shown_now(secured) == renewed.serial
    secured.made.roster.write_text(secured.made.roster.read_text() + '\n[[client]]\nid = 5\nname = "late"\n')
    made.make_clients([5], 1.0, renew=True)  # by the new authority
    certificate, key = made.client(5)
    latecomer = Pair(certificate.read_bytes(), key.read_bytes())
    with secured.client(5, latecomer) as client:
        until(lambda: not secured.causes(latecomer), "the roster to be read again")
        client.join()
        client.leave()
    secured.goes_on()
    assert secured.server.refusals()["evicted"] == evicted
    assert "joining again" not in secured.clients.log()


def test_an_identity_taken_off_the_roster_is_told_and_is_no_member_any_more(secured: Secured) -> None:
    before, text = secured.server.refusals(MINE), secured.made.roster.read_text()
    with secured.client(MINE, secured.pair(MINE)) as client:
        client.join()
        stream = client.attend(beat_s=0.05)
        head, _, tail = text.partition(f"\n[[client]]\nid = {MINE}\n")
        secured.made.roster.write_text(head + "".join(f"\n{entry}" for entry in tail.partition("\n[[client]]")[1:]))
        assert stream.wait_for("refusal").kind == pb.UNKNOWN_CLIENT
        stream.wait_for_end()
        stream.close()
        secured.made.roster.write_text(text)
        until(lambda: client.leave().refusal.kind == pb.NOT_A_MEMBER, "the roster to be read again")
    assert (secured.server.refusals(MINE) - before)["unknown_client"] >= 1
    secured.goes_on()


def test_a_stolen_identity_cannot_be_used_twice_at_once_without_being_seen(secured: Secured) -> None:
    before = secured.server.refusals(MINE)
    with secured.client(MINE, secured.pair(MINE)) as owner, secured.client(MINE, secured.pair(MINE)) as thief:
        mine = owner.join()
        again = owner.try_to_join(token="", previous=mine.incarnation).joined
        owner.caller.incarnation = again.incarnation
        stream = owner.attend()
        until(lambda: not owner.pull()[0].HasField("refusal"), "the owner to be in")
        assert secured.server.refusals(MINE)["evicted"] == before["evicted"]
        thief.join()
        assert stream.wait_for("evicted").client_id == MINE
        assert owner.pull()[0].refusal.kind == pb.SUPERSEDED
        stream.close()
        thief.leave()
    assert secured.server.refusals(MINE) - before == {"evicted": 1, "superseded": 1}
    assert f"client {MINE} has joined from ipv4:127.0.0.1:" in secured.server.log()
    assert "its credential is in other hands" in secured.server.log()


def test_a_process_goes_on_with_its_other_identities_when_one_is_stolen_or_revoked(secured: Secured) -> None:
    with secured.client(3, secured.pair(3)) as thief:
        thief.join()
        until(lambda: "client 3 stops here" in secured.clients.log(), "the owner to see the theft")
        thief.leave()
    secured.goes_on()
    before = secured.server.refusals(2)
    secured.made.revoke([2])
    until(lambda: "client 2 stops here" in secured.clients.log(), "the revoked identity to be told")
    assert (secured.server.refusals(2) - before)["revoked"] >= 1
    with secured.client(2, secured.pair(2)) as revoked:
        assert revoked.refused().kind == pb.REVOKED
    secured.goes_on()
    assert "client 3 has joined from elsewhere" in secured.clients.log()
    assert secured.clients.events("outcome") == secured.clients.events("error") == []
