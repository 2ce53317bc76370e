"""Certificates: how they are made and kept, whose they are, and who is let in with them."""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner

from common.certificates import client_uri, parse_certificates, read_authorities, read_pair
from common.config import Tls, experiment_from
from common.errors import ConfigError
from common.rereading import Reread
from common.rpc.credentials import client_credentials, refuse_unusable, server_credentials
from common.rpc.refusals import Refused, kind_name
from deploy import cli
from deploy.certs.folder import CertificateFolder
from deploy.certs.making import Authority, client_names, new_authority
from deploy.toml import to_toml
from ps.identity import ANYBODY, Gate, Peer, read_revoked, read_roster


@pytest.fixture
def folder(tmp_path: Path) -> CertificateFolder:
    """An authority, a server and clients 0 to 2."""
    made = CertificateFolder(tmp_path / "certs")
    made.begin(30.0)
    made.make_server([], 10.0, renew=False)
    made.make_clients(range(3), 10.0, renew=False)
    return made


def certs(*words: object) -> str:
    result = CliRunner().invoke(cli.app, ["certs", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def facts(path: Path) -> Any:
    return parse_certificates(path.read_bytes())[0]


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


# ---------------------------------------------------------------- making


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_keys_are_for_their_owner_only_and_certificates_for_everybody(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        certs(tmp_path / "certs", "--ids", "0,7")
        certs(tmp_path / "certs", "--ids", "0,7", "--renew", "--new-ca")
    finally:
        os.umask(before)
    keys = sorted(tmp_path.rglob("*.key"))
    assert [path.name for path in keys] == ["ca.key", "0.key", "7.key", "server.key"]
    assert {mode(path) for path in keys} == {0o600}
    assert {mode(path) for path in tmp_path.rglob("*") if path.suffix in (".pem", ".toml", ".txt")} - {0o644} == (
        set() if umask == 0o022 else {0o666 & ~umask}  # issued.txt is nobody's business
    )
    assert {mode(path) for path in (tmp_path / "certs", tmp_path / "certs" / "clients")} == {0o700}


def test_certificates_are_on_p256_for_one_use_one_name_and_one_time(folder: CertificateFolder) -> None:
    server, client = facts(folder.server[0]), facts(folder.client(2)[0])
    authority = facts(folder.authorities)
    for certificate in (server, client, authority):
        assert isinstance(certificate.x509.public_key().curve, ec.SECP256R1)
    assert (server.uses, server.client_id) == ({"server"}, None)
    assert set(server.names) == {"localhost", "127.0.0.1", "::1"}
    assert (client.uses, client.client_id, client.names) == ({"client"}, 2, ())
    assert 9.9 < server.days_left() < 10.0
    assert server.begins < datetime.now(UTC) - timedelta(minutes=4)  # a clock that is behind
    assert server.issued_by([authority])
    assert not authority.x509.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length


def test_a_certificate_never_outlives_its_authority(tmp_path: Path) -> None:
    made = CertificateFolder(tmp_path)
    made.begin(5.0)
    made.make_server([], 100.0, renew=False)
    assert facts(made.server[0]).ends == facts(made.authorities).ends


def test_the_server_is_named_as_asked_and_another_name_needs_renewal(tmp_path: Path) -> None:
    names = ["--server", "ps.example.org", "--server", "10.0.0.1", "--server", "fd00::1"]
    certs(tmp_path, *names)
    made = CertificateFolder(tmp_path)
    first = facts(made.server[0])
    assert set(first.names) == {"ps.example.org", "10.0.0.1", "fd00::1"}
    certs(tmp_path, *names)
    assert facts(made.server[0]).serial == first.serial
    with pytest.raises(ConfigError, match=r"ps\.example\.org.*other\.example\.org was asked for.*--renew"):
        certs(tmp_path, "--server", "other.example.org")
    certs(tmp_path, "--server", "other.example.org", "--renew")
    assert facts(made.server[0]).names == ("other.example.org",)


@pytest.mark.parametrize("name", ["two words", "https://ps", "ps:8080", "", "a..b", "ü.example"])
def test_a_server_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="expected a host name or an address"):
        certs(tmp_path, "--server", name)


def test_what_is_there_stays_and_renewal_replaces_it_under_the_same_names(tmp_path: Path) -> None:
    certs(tmp_path, "--server", "ps.example.org", "--ids", "0-2")
    made = CertificateFolder(tmp_path)
    before = [facts(path) for path in (made.server[0], *(made.client(number)[0] for number in range(3)))]
    assert "made 2 client certificates; 3 were there already" in certs(tmp_path, "--ids", "0-4")
    certs(tmp_path, "--renew")
    after = [facts(path) for path in (made.server[0], *(made.client(number)[0] for number in range(3)))]
    assert not {old.serial for old in before} & {new.serial for new in after}
    assert [old.names for old in before] == [new.names for new in after]
    for certificate, key in (made.server, made.client(0)):
        assert facts(certificate).has_key(key.read_bytes())
    assert made.client_ids == [0, 1, 2, 3, 4]


def test_a_new_authority_signs_while_the_older_ones_certificates_count_until_it_is_forgotten(
    folder: CertificateFolder,
) -> None:
    old = facts(folder.client(0)[0])
    assert "goes to everybody before" in certs(folder.path, "--new-ca")
    certs(folder.path, "--ids", "1", "--renew")
    new = facts(folder.client(1)[0])
    _, both = read_authorities(folder.authorities, "ca")
    assert len(both) == 2
    assert old.issued_by(both)
    assert new.issued_by(both[:1])
    assert not old.issued_by(both[:1])
    assert "1 old authority left out" in certs(folder.path, "--forget-old-cas")
    _, one = read_authorities(folder.authorities, "ca")
    assert [authority.fingerprint for authority in one] == [both[0].fingerprint]
    with pytest.raises(ConfigError, match="shut out every certificate"):
        certs(folder.path, "--new-ca", "--forget-old-cas")


def test_an_authority_that_is_over_or_has_lost_its_key_signs_nothing(folder: CertificateFolder) -> None:
    key = (folder.path / "ca.key").read_bytes()
    (folder.path / "ca.key").write_bytes(new_authority(1.0).key)
    with pytest.raises(ConfigError, match=r"not that of the certificate.*--new-ca"):
        certs(folder.path, "--ids", "9")
    (folder.path / "ca.key").write_bytes(key)
    past = new_authority(1.0, now=datetime.now(UTC) - timedelta(days=2))
    folder.authorities.write_bytes(past.certificate)
    (folder.path / "ca.key").write_bytes(past.key)
    with pytest.raises(ConfigError, match=r"valid until .*--new-ca"):
        certs(folder.path, "--ids", "9")


def test_revoking_an_identity_revokes_every_certificate_it_ever_had(folder: CertificateFolder) -> None:
    first = facts(folder.client(1)[0]).serial
    certs(folder.path, "--ids", "1", "--renew")
    second = facts(folder.client(1)[0]).serial
    assert "revoked 2 certificates of 1 client" in certs(folder.path, "--revoke", "1")
    assert read_revoked(folder.revoked) == {first, second}
    assert "revoked 0 certificates" in certs(folder.path, "--revoke", "1")
    certs(folder.path, "--ids", "1", "--renew")
    assert facts(folder.client(1)[0]).serial not in read_revoked(folder.revoked)
    with pytest.raises(ConfigError, match="client 9 has no certificate"):
        certs(folder.path, "--revoke", "9")


def test_the_roster_lists_the_new_certificate_beside_the_one_in_use_and_keeps_what_people_wrote(
    folder: CertificateFolder,
) -> None:
    before = facts(folder.client(0)[0]).fingerprint
    text = folder.roster.read_text().replace("id = 0\n", 'id = 0\nname = "Hôpital \\"Nord\\""\n')
    folder.roster.write_text(text + "\n[[client]]\nid = 8\n")
    certs(folder.path, "--ids", "0,8", "--renew")
    listed = read_roster(folder.roster, num_clients=9)
    now = facts(folder.client(0)[0]).fingerprint
    assert (listed[0].name, listed[0].fingerprints) == ('Hôpital "Nord"', {before, now})
    assert listed[8].fingerprints == frozenset()  # any certificate of client 8, as the operator said
    certs(folder.path, "--ids", "0", "--renew")
    assert read_roster(folder.roster, num_clients=9)[0].fingerprints == {now, facts(folder.client(0)[0]).fingerprint}


def test_the_commands_that_certs_prints_are_ones_that_the_command_line_takes(tmp_path: Path) -> None:
    printed = certs(tmp_path, "--ids", "0-1").splitlines()[-2:]
    for line, name in zip(printed, ("ps", "client"), strict=True):
        words = line.partition("byzuldp ")[2].split()
        assert words[0] == name
        help_text = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "300"}).output
        assert [word for word in words if word.startswith("--") and word not in help_text] == []


# ---------------------------------------------------------------- reading, and refusing what will not do


def signed_by_itself(key: Any) -> tuple[bytes, bytes]:
    """A client's certificate with some other kind of key."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "c")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(5)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made.public_bytes(serialization.Encoding.PEM), secret


KEYS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "ed25519": (ed25519.Ed25519PrivateKey.generate, "its key is Ed25519, with which gRPC's handshake fails"),
    "p521": (lambda: ec.generate_private_key(ec.SECP521R1()), "its key is on secp521r1"),
    "rsa1024": (lambda: rsa.generate_private_key(65537, 1024), "its RSA key has 1024 bits"),  # noqa: S505
    "rsa2048": (lambda: rsa.generate_private_key(65537, 2048), None),
    "p384": (lambda: ec.generate_private_key(ec.SECP384R1()), None),
}


@pytest.mark.parametrize("kind", KEYS)
def test_a_key_that_fails_the_handshake_is_refused_before_it(tmp_path: Path, kind: str) -> None:
    make, words = KEYS[kind]
    certificate, key = tmp_path / "c.pem", tmp_path / "c.key"
    for path, content in zip((certificate, key), signed_by_itself(make()), strict=True):
        path.write_bytes(content)
    if words is None:
        assert read_pair(certificate, key, "client", "network.tls")[2].serial == 5
        return
    with pytest.raises(ConfigError) as refused:
        read_pair(certificate, key, "client", "network.tls")
    assert f"wrong key type: {words}; expected an elliptic curve key on P-256" in str(refused.value)


@pytest.fixture(scope="module")
def authority() -> Authority:
    made = new_authority(5.0)
    return Authority.from_pem(made.certificate, made.key)


def test_a_certificate_says_why_it_cannot_be_used(tmp_path: Path, authority: Authority) -> None:
    now = datetime.now(UTC)
    certificate, key = tmp_path / "c.pem", tmp_path / "c.key"

    def refusal(pair: Any, use: Any) -> str:
        certificate.write_bytes(pair.certificate)
        key.write_bytes(pair.key)
        with pytest.raises(ConfigError) as refused:
            read_pair(certificate, key, use, "network.tls")
        return str(refused.value)

    client = authority.issue("c", client_names(3), "client", 1.0)
    old = authority.issue("c", client_names(3), "client", 1.0, now=now - timedelta(days=2))
    early = authority.issue("c", client_names(3), "client", 1.0, now=now + timedelta(days=2))
    assert "expired: it was valid until" in refusal(old, "client")
    assert "not yet valid: it is valid from" in refusal(early, "client")
    assert "wrong use: expected one made for a server, it was made for a client" in refusal(client, "server")
    assert "client 3" in refusal(client, "server")
    key.write_bytes(old.key)
    certificate.write_bytes(client.certificate)
    with pytest.raises(
        ConfigError, match=r"network\.tls\.key.*expected the private key of the certificate of client 3"
    ):
        read_pair(certificate, key, "client", "network.tls")
    certificate.write_text("-----BEGIN NOTHING-----")
    with pytest.raises(ConfigError, match=r"network\.tls\.certificate.*holds no certificate in PEM form"):
        read_pair(certificate, key, "client", "network.tls")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_pair(tmp_path / "nothing.pem", key, "client", "network.tls")


def test_a_bundle_of_authorities_holds_authorities_only(folder: CertificateFolder) -> None:
    with pytest.raises(ConfigError, match=r"network\.tls\.ca.*is no authority's"):
        read_authorities(folder.client(0)[0], "network.tls.ca")


def client_tls(folder: CertificateFolder, name: str = "{id}") -> Tls:
    certificate, key = folder.client(name)
    return Tls(ca=folder.authorities, certificate=str(certificate), key=str(key))


def test_an_identity_speaks_with_its_own_certificate_only(folder: CertificateFolder) -> None:
    refuse_unusable(client_tls(folder), [0, 1, 2])
    assert client_credentials(client_tls(folder), 2).certificate.client_id == 2
    with pytest.raises(ConfigError, match=r"is that of client 1; expected client 2's"):
        client_credentials(client_tls(folder, "1"), 2)
    with pytest.raises(ConfigError, match=r"one file for several identities.*\{id\}"):
        refuse_unusable(client_tls(folder, "1"), [1, 2])
    with pytest.raises(ConfigError, match=r"9\.pem.*cannot be read"):
        refuse_unusable(client_tls(folder), [0, 9])


def test_a_secret_key_is_not_shown_by_accident(folder: CertificateFolder) -> None:
    assert "PRIVATE" not in repr(client_credentials(client_tls(folder), 0))
    assert "PRIVATE" not in repr(new_authority(1.0))


def test_a_server_starts_with_a_servers_certificate_only(folder: CertificateFolder) -> None:
    certificate, key = folder.server
    server_credentials(Tls(ca=folder.authorities, certificate=str(certificate), key=str(key)))
    with pytest.raises(ConfigError, match="wrong use: expected one made for a server"):
        server_credentials(client_tls(folder, "0"))


def test_a_certificate_that_will_soon_be_over_is_a_warning(
    folder: CertificateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    client_credentials(client_tls(folder), 0)
    assert "valid for 10.0 days more" in caplog.text


# ---------------------------------------------------------------- the configuration


def test_tls_is_whole_or_not_there() -> None:
    def refusal(**tls: str) -> str:
        with pytest.raises(ConfigError) as refused:
            experiment_from({"federation": {"clients": 3}, "training": {"rounds": 1}, "network": {"tls": tls}})
        return str(refused.value)

    assert "key missing: TLS needs ca, certificate and key" in refusal(ca="a", certificate="b")
    assert "go with ca, certificate and key" in refusal(roster="a")
    assert "did you mean 'revoked'" in refusal(revoke="a")


def test_where_certificates_lie_is_nobodys_business_but_one_s_own() -> None:
    tree = {"federation": {"clients": 3}, "training": {"rounds": 1}}
    tls = {"ca": "ca.pem", "certificate": "c.pem", "key": "c.key", "roster": "r.toml"}
    plain, secured = experiment_from(tree), experiment_from(tree | {"network": {"tls": tls}})
    assert secured.fingerprint() == plain.fingerprint()
    assert "c.key" not in str(secured.public())
    assert experiment_from(tomllib.loads(to_toml(secured.model_dump(mode="json")))) == secured
    assert (plain.network.tls.enabled, secured.network.tls.enabled) == (False, True)


def test_run_refuses_certificates_and_client_needs_them_or_tokens(tmp_path: Path, folder: CertificateFolder) -> None:
    experiment = tmp_path / "e.toml"
    experiment.write_text("[federation]\nclients = 3\n[training]\nrounds = 1\n")
    certificate, key = folder.server
    tls = {"ca": folder.authorities, "certificate": certificate, "key": key}
    sets = [word for name, path in tls.items() for word in ("--set", f"network.tls.{name}={path}")]
    runner = CliRunner()
    with pytest.raises(ConfigError, match=r"network\.tls is set.*byzuldp ps"):
        runner.invoke(cli.app, ["run", str(experiment), "--quiet", *sets], catch_exceptions=False)
    asked = ["client", str(experiment), "--address", "127.0.0.1:9", "--ids", "0"]
    with pytest.raises(ConfigError, match="--tokens is missing"):
        runner.invoke(cli.app, asked, catch_exceptions=False)
    wrong = ["--tls-ca", str(folder.authorities), "--tls-cert", str(certificate), "--tls-key", str(key)]
    with pytest.raises(ConfigError, match="wrong use: expected one made for a client"):
        runner.invoke(cli.app, [*asked, *wrong], catch_exceptions=False)


# ---------------------------------------------------------------- the gate


@pytest.fixture
def gate(folder: CertificateFolder, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Of a parameter server with four identities, whose roster lists 0 to 2."""
    monkeypatch.setattr("ps.identity.LOOK_AGAIN_S", 0.0)
    certificate, key = folder.server
    files = {"ca": folder.authorities, "certificate": str(certificate), "key": str(key)}
    return Gate(Tls(**files, roster=folder.roster, revoked=folder.revoked), 4)


def peer(folder: CertificateFolder, client_id: int) -> Peer:
    return Peer("ipv4:127.0.0.1:5", facts(folder.client(client_id)[0]))


def refused(gate: Gate, who: Peer, client_id: int) -> tuple[str, str]:
    with pytest.raises(Refused) as refusal:
        gate.admit(who, client_id)
    return kind_name(refusal.value.kind), refusal.value.message


def test_a_certificate_opens_one_identity(gate: Gate, folder: CertificateFolder) -> None:
    gate.admit(peer(folder, 1), 1)
    kind, message = refused(gate, peer(folder, 1), 2)
    assert kind == "wrong_certificate"
    assert "expected the certificate of client 2, found the certificate of client 1" in message
    server = Peer("ipv4:127.0.0.1:5", facts(folder.server[0]))
    assert refused(gate, server, 1)[0] == "wrong_certificate"
    assert refused(gate, ANYBODY, 1) == (
        "wrong_certificate",
        "expected the certificate of client 1, found no certificate",
    )


def test_a_certificate_of_several_identities_opens_none(gate: Gate, authority: Authority) -> None:
    both = authority.issue("c", [*client_names(1), *client_names(2)], "client", 1.0)
    for client_id in (1, 2):
        assert "names no client" in refused(gate, Peer("", both.facts), client_id)[1]


@pytest.mark.parametrize(
    "uri", ["byzuldp://client/01", "byzuldp://client/1/2", "byzuldp://clients/1", "http://client/1"]
)
def test_an_identity_has_one_spelling(authority: Authority, uri: str) -> None:
    assert authority.issue("c", [x509.UniformResourceIdentifier(uri)], "client", 1.0).facts.client_id is None
    assert client_uri(1) == "byzuldp://client/1"


def test_revocation_is_seen_without_a_restart_and_by_serial_number(
    gate: Gate, folder: CertificateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    who = peer(folder, 1)
    gate.admit(who, 1)
    folder.revoke([1])
    kind, message = refused(gate, who, 1)
    assert (kind, f"{who.certificate.serial:x}" in message) == ("revoked", True)
    assert "refused client 1 at ipv4:127.0.0.1:5" in caplog.text
    refused(gate, who, 1)
    assert caplog.text.count("refused client 1") == 1  # a peer must not fill logs
    folder.make_clients([1], 1.0, renew=True)
    gate.admit(peer(folder, 1), 1)


def test_the_roster_is_read_again_and_a_broken_one_changes_nothing(
    gate: Gate, folder: CertificateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    whole = folder.roster.read_text()
    folder.make_clients([3], 1.0, renew=False)
    gate.admit(peer(folder, 3), 3)
    folder.roster.write_text(whole)
    assert refused(gate, peer(folder, 3), 3)[0] == "unknown_client"
    folder.roster.write_text("[[client]]\nid = ")
    gate.admit(peer(folder, 1), 1)
    assert "what was read before stays in force" in caplog.text
    folder.roster.unlink()
    gate.admit(peer(folder, 1), 1)
    folder.roster.write_text("")
    assert refused(gate, peer(folder, 1), 1)[0] == "unknown_client"


def test_a_listed_fingerprint_admits_that_certificate_only(gate: Gate, folder: CertificateFolder) -> None:
    listed, name = peer(folder, 0), "\n".join(folder.roster.read_text().splitlines())
    folder.make_clients([0], 1.0, renew=True)
    another = peer(folder, 0)
    folder.roster.write_text(name)
    gate.admit(listed, 0)
    kind, message = refused(gate, another, 0)
    assert kind == "wrong_certificate"
    assert another.certificate.fingerprint in message


def test_without_tls_there_is_nothing_at_the_gate() -> None:
    gate = Gate(Tls(), 4)
    gate.admit(ANYBODY, 3)
    assert not gate.certified
    assert gate.peer(SimpleNamespace(peer=lambda: "ipv4:1.2.3.4:5")) == Peer("ipv4:1.2.3.4:5")  # type: ignore[arg-type]


ROSTERS = {
    "not toml": ("id = ", "not valid TOML"),
    "another key": ("[[clients]]\nid = 1\n", r"expected \[\[client\]\] entries only, found clients"),
    "no id": ("[[client]]\nname = 'x'\n", "entry 1: id = None: expected a number from 0 to 3"),
    "beyond the roster": ("[[client]]\nid = 4\n", "entry 1: id = 4: expected a number from 0 to 3"),
    "true": ("[[client]]\nid = true\n", "entry 1: id = True"),
    "twice": ("[[client]]\nid = 1\n[[client]]\nid = 1\n", "entry 2: id = 1 is listed twice"),
    "a short fingerprint": ("[[client]]\nid = 1\nfingerprint = 'abc'\n", "expected 64 hex digits"),
    "a stray key": ("[[client]]\nid = 1\nnmae = 'x'\n", "expected id, name and fingerprint"),
}


@pytest.mark.parametrize("what", ROSTERS)
def test_a_roster_file_that_is_wrong_is_refused_by_its_entry(tmp_path: Path, what: str) -> None:
    text, words = ROSTERS[what]
    path = tmp_path / "roster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_roster(path, num_clients=4)


def test_serial_numbers_are_read_as_tools_print_them(tmp_path: Path) -> None:
    path = tmp_path / "revoked.txt"
    path.write_text("# none of these\n\n0A:1b:FF  # a leaked one\n 7\n")
    assert read_revoked(path) == {0x0A1BFF, 7}
    path.write_text("7\nclient 3\n")
    with pytest.raises(ConfigError, match=r"line 2: 'client 3' is no serial number"):
        read_revoked(path)


# ---------------------------------------------------------------- reading again


def test_files_are_read_again_when_they_change_and_only_then(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, reads = tmp_path / "file", list[str]()
    path.write_text("1")

    def read() -> str:
        reads.append(path.read_text())
        if reads[-1] == "bad":
            raise ConfigError("bad content")
        return reads[-1]

    files = Reread([path], read)
    assert [files.current(), files.current(), len(reads)] == ["1", "1", 1]
    path.with_suffix(".new").write_text("2")
    path.with_suffix(".new").replace(path)
    assert [files.current(), files.current(), len(reads)] == ["2", "2", 2]
    path.write_text("bad")
    with caplog.at_level(logging.WARNING):
        assert [files.current(), files.current(), len(reads)] == ["2", "2", 3]
    assert caplog.text.count("bad content") == 1
    path.write_text("three")
    assert files.current() == "three"
