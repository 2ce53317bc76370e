"""The status page says what is so, to whom it may, and no reader of it holds up a round."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from federations import ServerProcess, client_process, small_experiment, until
from prometheus_client.parser import text_string_to_metric_families
from stock_client import Federation

from common.rpc.addresses import Address
from common.rpc.v1 import parameter_server_pb2 as pb
from ps.privacy.ledger import Budget, Ledger
from ps.reader import RunReader
from ps.status import StatusPage
from ps.status import http as served_by
from ps.status.access import Access, Tokens
from ps.summary import OPERATOR_ONLY

ROUNDS = 6
ON: dict[str, Any] = {"monitoring": {"status": "127.0.0.1:0"}}
PRIVATE: dict[str, Any] = ON | {
    "aggregation": {"rule": "trimmed_mean"},
    "privacy": {"epsilon": 8.0, "delta": 1e-3},
    "evaluation": {"every": 2},
    "training": {"rounds": 50},
    "network": {"grace_floor_s": 1.0},
}
PUBLIC_PATHS = ("/", "/state", "/events", "/page.css", "/page.js", "/draw.js")
OPERATOR_PATHS = ("/metrics", *(f"/operator{path}" for path in PUBLIC_PATHS))


class Site:
    """A status page, asked by hand."""

    def __init__(self, host: str, port: int, operator: str) -> None:
        self.host, self.port, self.token = host, port, operator

    @classmethod
    def of(cls, server: ServerProcess) -> Site:
        event = server.wait_for("status_page")
        place = urlsplit(event["operator_url"])
        assert place.hostname is not None
        assert place.port is not None
        assert event["url"] == f"http://{place.netloc}/"
        return cls(place.hostname, place.port, place.query.removeprefix("token="))

    def ask(
        self, path: str, headers: Mapping[str, str] | None = None, *, method: str = "GET"
    ) -> tuple[int, Mapping[str, str], str]:
        """Status, headers and body; of a stream of events, the first."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        try:
            connection.request(method, path, headers=dict(headers or {}))
            answer = connection.getresponse()
            told = dict(answer.getheaders())
            stream = told.get("Content-Type", "").startswith("text/event-stream")
            body = b"".join(iter(answer.readline, b"\n")) if stream else answer.read()
            return answer.status, told, body.decode()
        finally:
            connection.close()

    def bearer(self, token: str | None = None) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token if token is None else token}"}

    def state(self, *, operator: bool = False) -> dict[str, Any]:
        status, _, body = self.ask("/operator/state" if operator else "/state", self.bearer() if operator else None)
        assert status == 200, body
        return json.loads(body)

    def connect(self, said: bytes = b"") -> socket.socket:
        """A peer that does no more than this."""
        peer = socket.create_connection((self.host, self.port), timeout=30)
        peer.sendall(said)
        return peer


class Served:
    """A private run that stands still after some rounds; client 4 missed the last one and broke the protocol."""

    def __init__(self, folder: Path, resources: ExitStack) -> None:
        self.server = resources.enter_context(ServerProcess(small_experiment(**PRIVATE), folder)).listening()
        self.federation = Federation(self.server)
        resources.callback(self.federation.close)
        self.site = Site.of(self.server)
        federation = self.federation
        for round_id in range(ROUNDS):
            federation.clients[0].pull(round_id)
            late = [4] if round_id == ROUNDS - 1 else []
            federation.push_all(round_id, federation.rows(round_id), but=late)
        federation.clients[0].pull(ROUNDS)
        liar = federation.clients[4]
        assert liar.push(ROUNDS + 7, federation.rows(0)[4]).refusal.kind == pb.FUTURE_ROUND
        self.reader = RunReader(self.server.run_dir)
        until(lambda: len(self.reader.rounds()) == ROUNDS and self.reader.refusals(), "all of it to be recorded")
        until(lambda: self.site.state()["round"] == ROUNDS, "the page to show the last round")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ExitStack() as resources:
        yield Served(tmp_path_factory.mktemp("status"), resources)


# ---------------------------------------------------------------- who may read what


@pytest.mark.parametrize("path", PUBLIC_PATHS)
def test_on_loopback_the_public_part_needs_no_token(served: Served, path: str) -> None:
    assert served.site.ask(path)[0] == 200


@pytest.mark.parametrize("path", OPERATOR_PATHS)
def test_the_operators_part_needs_the_operators_token(served: Served, path: str) -> None:
    site = served.site
    status, headers, body = site.ask(path)
    assert (status, headers["WWW-Authenticate"]) == (401, 'Bearer realm="byzuldp"')
    assert "operator/status_token" in body
    assert site.ask(path, site.bearer("guessed"))[0] == 403
    assert site.ask(path, site.bearer())[0] == 200


def test_what_is_nearly_the_operators_token_is_not(served: Served) -> None:
    site, page_token = served.site, (served.server.run_dir / "operator" / "status_page_token").read_text().strip()
    for wrong in (site.token[:-1], site.token + "x", page_token, "\xff", "x" * 3000):
        assert site.ask("/metrics", site.bearer(wrong))[0] == 403
        assert site.ask("/operator/state", {"Cookie": f"byzuldp-operator-{served.reader.run_id}={wrong}"})[0] != 200
    assert site.ask("/metrics?token=guessed", site.bearer())[0] == 403, "the one in the address counts"
    assert site.ask(f"/metrics?token={site.token}")[0] == 200
    assert site.ask("/metrics", {"Authorization": f"Basic {site.token}"})[0] == 401


def test_a_token_in_the_address_becomes_a_cookie_that_no_script_and_no_other_site_can_use(served: Served) -> None:
    _, headers, _ = served.site.ask(f"/operator/?token={served.site.token}")
    cookie, *attributes = [part.strip() for part in headers["Set-Cookie"].split(";")]
    assert {"HttpOnly", "SameSite=Strict", "Path=/operator/"} <= set(attributes)
    assert served.site.ask("/operator/state", {"Cookie": cookie})[0] == 200
    assert "Set-Cookie" not in served.site.ask("/operator/?token=guessed")[1]
    assert "Set-Cookie" not in served.site.ask("/operator/state", served.site.bearer())[1]


def test_tokens_are_in_files_of_the_operator_alone_and_in_no_log(served: Served) -> None:
    for name in ("status_token", "status_page_token"):
        path = served.server.run_dir / "operator" / name
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.read_text().strip() not in served.server.log()
    assert (served.server.run_dir / "operator" / "status_token").read_text().strip() == served.site.token


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "192.0.2.7:80", "[", ""])
def test_a_foreign_name_that_leads_to_loopback_is_not_served(served: Served, host: str) -> None:
    for path in ("/events", "/metrics"):
        assert served.site.ask(path, served.site.bearer() | {"Host": host})[0] == 421


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1", "[::1]:9000"])
def test_loopback_by_any_of_its_names_and_through_a_tunnel_is_served(served: Served, host: str) -> None:
    assert served.site.ask("/state", {"Host": host})[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH"])
def test_nothing_but_get_is_answered(served: Served, method: str) -> None:
    status, headers, _ = served.site.ask("/operator/state", served.site.bearer(), method=method)
    assert (status, headers["Allow"]) == (405, "GET")


@pytest.mark.parametrize("path", ["/x", "/operator/x", "/../etc/passwd", "/operator/../state", "/page.html", "//"])
def test_what_is_not_there_is_not_found(served: Served, path: str) -> None:
    assert served.site.ask(path, served.site.bearer())[0] == 404


@pytest.mark.parametrize("path", ["/", "/state", "/events", "/metrics", "/operator/", "/nowhere"])
def test_every_answer_forbids_frames_caches_referrers_and_outside_resources(served: Served, path: str) -> None:
    _, headers, _ = served.site.ask(path)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9 + b"\r\n\r\n",
    ],
    ids=["line", "header", "headers", "tls"],
)
def test_a_request_that_is_too_large_or_no_http_is_refused(served: Served, request_bytes: bytes) -> None:
    with served.site.connect(request_bytes) as peer:
        try:
            answer = peer.recv(100)
        except ConnectionError:
            answer = b""
    assert not answer or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400", b"HTTP/1.1 431"))
    assert served.site.ask("/state")[0] == 200
    assert "Traceback" not in served.server.log()


# ---------------------------------------------------------------- what it says


def keys_in(tree: Any) -> set[str]:
    if isinstance(tree, dict):
        return set(tree) | {key for value in tree.values() for key in keys_in(value)}
    return {key for value in tree for key in keys_in(value)} if isinstance(tree, list) else set()


ABOUT = {"run_id", "clients", "byzantine", "rule", "parameters", "rounds"}
PROGRESS = {"status", "message", "ended", "round", "accuracy"}
CLAIM = {"privacy", "private", "private_because", "premises", "neighbouring", "epsilon", "delta", "spent"}
PUBLIC_KEYS = ABOUT | PROGRESS | CLAIM


def test_the_public_part_has_nothing_of_who_answered_when_or_how_fast(served: Served) -> None:
    before = served.site.state()
    assert keys_in(before) == PUBLIC_KEYS
    assert not PUBLIC_KEYS & set(OPERATOR_ONLY)
    assert before["status"] == "running"
    event = served.site.ask("/events", served.site.bearer())[2]
    kind, data = event.splitlines()[:2]
    assert kind == "event: state"
    assert json.loads(data.removeprefix("data: ")) == served.site.state()
    assert json.dumps(before).count("client") <= 8, "in premises, and as the number of clients"


def test_epsilon_is_that_of_the_ledger(served: Served) -> None:
    ledger = Ledger.restored((text, head) for _, text, head in served.reader.ledger_rows())
    budget = Budget.of(ledger.genesis)
    assert budget is not None
    privacy = served.site.state()["privacy"]
    assert privacy["spent"][-1] == [ROUNDS, pytest.approx(ledger.epsilon_spent(1e-3), rel=1e-12)]
    assert [round_id for round_id, _ in privacy["spent"]] == list(range(ROUNDS + 1))
    assert (privacy["epsilon"], privacy["delta"]) == (8.0, 1e-3)
    assert privacy["premises"] == list(ledger.genesis.premises)


def test_accuracy_is_that_of_the_evaluations(served: Served) -> None:
    expected = [[record.round_id, record.accuracy] for record in served.reader.evaluations()]
    assert len(expected) >= 2
    until(lambda: served.site.state()["accuracy"] == expected, "the accuracies to be shown")


def test_the_operator_sees_members_misses_refusals_phases_and_spans(served: Served) -> None:
    facts = until(
        lambda: found if (found := served.site.state(operator=True)["operator"])["refusals"] else None, "refusals"
    )
    rounds = served.reader.rounds()
    members = {member["client"]: member for member in facts["members"]}
    assert set(members) == set(range(5))
    assert [members[k]["missed"] for k in range(5)] == [0, 0, 0, 0, 1]
    assert members[4]["refused"] == 1
    assert facts["refusals"] == [["future_round", 1]]
    assert all(member["state"] == "live" and 0 <= member["seen_s"] < 120 for member in members.values())
    assert facts["live"] == 5
    assert [(m["round"], m["latency_s"]) for m in facts["recent"]] == [
        (m.round_id, pytest.approx(m.latency_s)) for m in rounds
    ]
    assert facts["recent"][-1]["segments"] == pytest.approx(dict(rounds[-1].segments), abs=1e-6)
    assert facts["answered"] == 4
    uploads = {client for name, client, *_ in facts["waterfall"]["spans"] if name == "upload"}
    assert uploads == {0, 1, 2, 3}


def test_the_figures_for_prometheus_are_those_of_the_store(served: Served) -> None:
    _, headers, text = served.site.ask("/metrics", served.site.bearer())
    assert headers["Content-Type"].startswith("text/plain")
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    rounds = served.reader.rounds()
    assert samples["byzuldp_round",] == samples["byzuldp_rounds_total",] == ROUNDS
    assert samples["byzuldp_round_seconds_count",] == ROUNDS
    assert samples["byzuldp_round_seconds_sum",] == pytest.approx(sum(m.latency_s for m in rounds))
    for name in rounds[0].segments:
        assert samples["byzuldp_segment_seconds_sum", ("phase", name)] == pytest.approx(
            sum(m.segments[name] for m in rounds), abs=1e-6
        )
    assert samples["byzuldp_sent_bytes_total",] == sum(m.bytes_down for m in rounds)
    assert samples["byzuldp_received_bytes_total",] == sum(m.bytes_up for m in rounds) > 0
    assert samples["byzuldp_answers",] == rounds[-1].answered == 4
    assert samples["byzuldp_live_members",] == 5
    assert samples["byzuldp_refusals_total", ("kind", "future_round")] == 1
    assert samples["byzuldp_epsilon",] == served.site.state()["privacy"]["spent"][-1][1]
    assert samples["byzuldp_rounds_planned",] == 50
    assert not any("client" in str(key) for key in samples)


# ---------------------------------------------------------------- what it does not do


def test_silent_slow_and_greedy_peers_do_not_hold_up_rounds(served: Served) -> None:
    """More of them than there are connections; this test is the last one to use the run."""
    federation, site = served.federation, served.site
    with ExitStack() as peers:
        for k in range(30):
            peers.enter_context(site.connect())
            peers.enter_context(site.connect(b"GET /state HTTP/1.1\r\nHost: local"))
            stream = f"GET /operator/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {site.token}\r\n\r\n"
            peers.enter_context(site.connect(stream.encode() * (200 if k % 2 else 1)))
        began = time.monotonic()
        for round_id in range(ROUNDS, ROUNDS + 12):
            federation.clients[0].pull(round_id)
            federation.push_all(round_id, federation.rows(round_id))
        federation.clients[0].pull(ROUNDS + 12)
        took = time.monotonic() - began
    rounds = until(lambda: (found := served.reader.rounds())[ROUNDS + 12 :] or found[ROUNDS + 11 :], "the rounds")
    assert rounds[-1].answered == 5
    assert took < 60.0


def test_the_page_of_a_run_that_ends_says_so_last_and_is_gone(tmp_path: Path) -> None:
    experiment = small_experiment(**ON, training={"rounds": 30})
    with ServerProcess(experiment, tmp_path).listening() as server:
        site = Site.of(server)
        connection = http.client.HTTPConnection(site.host, site.port, timeout=60)
        connection.request("GET", "/operator/events", headers=site.bearer())
        stream = connection.getresponse()
        with client_process(tmp_path, experiment, server.address, server.tokens()):
            text = stream.read().decode()  # until the server ends it
            server.finish()
        connection.close()
    states = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    assert [state["ended"] for state in states] == [False] * (len(states) - 1) + [True]
    assert (states[-1]["status"], states[-1]["round"]) == ("completed", 30)
    assert states[-1]["privacy"]["epsilon"] is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((site.host, site.port))
    summary = json.loads((server.run_dir / "public" / "summary.json").read_text())
    assert states[-1]["accuracy"][-1] == [30, summary["final_accuracy"]]
    assert states[-1]["message"] == summary["message"]


def test_a_resumed_run_keeps_its_tokens_and_counts_on_and_may_change_its_page(tmp_path: Path) -> None:
    experiment = small_experiment(**PRIVATE)
    with ServerProcess(experiment, tmp_path).listening() as server:
        federation, first = Federation(server), Site.of(server)
        for round_id in range(3):
            federation.push_all(round_id, federation.rows(round_id))
            federation.clients[0].pull(round_id + 1)
        until(lambda: len(RunReader(server.run_dir).rounds()) == 3, "the rounds to be recorded")
        federation.close()
        server.kill()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        again = small_experiment(**PRIVATE | {"monitoring": {"status": f"127.0.0.1:{taken.getsockname()[1]}"}})
        with ServerProcess(again, tmp_path, resume=True) as refused:
            assert refused.exit_code() == 10
            (error,) = refused.events("error")
            assert "monitoring.status" in error["message"]
            assert "in use" in error["message"]
    again = small_experiment(**PRIVATE | {"monitoring": {"status": "[::1]:0"}})
    with ServerProcess(again, tmp_path, resume=True).listening() as server:
        site = Site.of(server)
        assert (site.host, site.token) == ("::1", first.token)
        state = site.state(operator=True)
        assert state["round"] == 3
        assert [round_id for round_id, _ in state["privacy"]["spent"]] == [0, 1, 2, 3]
        assert [m["round"] for m in state["operator"]["recent"]] == [0, 1, 2]
        assert {member["state"] for member in state["operator"]["members"]} == {"never joined"}
        assert "byzuldp_rounds_total 3.0" in site.ask("/metrics", site.bearer())[2]


def test_a_port_that_is_taken_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with ServerProcess(small_experiment(monitoring={"status": address}), tmp_path) as server:
            assert server.exit_code() == 10
    (error,) = server.events("error")
    assert error["status"] == "config_invalid"
    assert f"monitoring.status = '{address}'" in error["message"]
    assert not server.run_dir.exists()


# ---------------------------------------------------------------- the server alone, in this process


class _Feed:
    ended = False

    async def state(self, part: str) -> tuple[str, bool]:
        return json.dumps({"part": part, "filler": "x" * 200_000, "at": time.monotonic()}), self.ended

    async def metrics(self) -> bytes:
        raise ValueError("a defect")

    def drain(self) -> None: ...

    def stop(self) -> None:
        self.ended = True


@contextmanager
def serving(address: Address) -> Iterator[Site]:
    """A server of this process, told that it listens at ``address``."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    ready = threading.Event()

    async def serve() -> None:
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        ready.set()
        access = Access(Tokens("operator" * 4, "page" * 8), address)
        await served_by.Server(listener, access, _Feed(), "run").serve(stop)  # type: ignore[arg-type]

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ready.wait()
    try:
        yield Site("127.0.0.1", listener.getsockname()[1], "operator" * 4)
    finally:
        began = time.monotonic()
        loops[0][0].call_soon_threadsafe(loops[0][1].set)
        thread.join(30)
        assert time.monotonic() - began < 5.0, "stopping must not wait for a peer"


def test_beyond_loopback_every_page_needs_a_token_and_the_pages_own_opens_the_public_part_alone() -> None:
    with serving(Address("192.0.2.1", 8080)) as site:
        page = site.bearer("page" * 8)
        for path in (*PUBLIC_PATHS, "/nowhere"):
            assert site.ask(path, {"Host": "any.example"})[0] == 401
            assert site.ask(path, site.bearer("guessed"))[0] == 403
            found = 404 if path == "/nowhere" else 200
            assert site.ask(path, page)[0] == site.ask(path, site.bearer())[0] == found
        for path in OPERATOR_PATHS[1:]:
            assert site.ask(path, page)[0] == 403
            assert site.ask(path, site.bearer())[0] == 200
        cookie = site.ask(f"/?token={'page' * 8}")[1]["Set-Cookie"]
        assert "Path=/;" in f"{cookie};"
        assert site.ask("/state", {"Cookie": cookie.partition(";")[0]})[0] == 200
        assert site.ask("/operator/state", {"Cookie": cookie.partition(";")[0]})[0] == 401


def test_peers_that_dawdle_are_cut_off_and_others_are_answered_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_by, "LIFE_S", 0.3)
    monkeypatch.setattr(served_by, "WRITE_S", 0.3)
    monkeypatch.setattr(served_by, "CONNECTIONS", 6)
    monkeypatch.setattr(served_by, "STREAMS", 2)
    monkeypatch.setattr(served_by, "TELL_EVERY_S", 0.01)
    with serving(Address("127.0.0.1", 1)) as site, ExitStack() as peers:
        dawdlers = [peers.enter_context(site.connect(b"GET / HT")) for _ in range(8)]
        assert site.ask("/page.js")[0] == 200
        assert all(peer.recv(1) == b"" for peer in dawdlers[:6])
        reader = peers.enter_context(site.connect(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        until(lambda: reader.recv(50_000, socket.MSG_PEEK), "the stream to begin")
        time.sleep(0.6)  # not read: what is sent fills the buffers
        for _ in range(20):
            peers.enter_context(site.connect(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        until(lambda: site.ask("/page.js")[0] == 200, "an answer")


def test_too_many_streams_are_refused_and_pages_still_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_by, "STREAMS", 2)
    with serving(Address("127.0.0.1", 1)) as site, ExitStack() as peers:
        for _ in range(2):
            peer = peers.enter_context(site.connect(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"))
            assert peer.recv(12) == b"HTTP/1.1 200"
        assert site.ask("/events")[0] == 503
        assert site.ask("/state")[0] == 200


def test_a_defect_of_the_page_is_logged_once_and_answered_in_words(caplog: pytest.LogCaptureFixture) -> None:
    with serving(Address("127.0.0.1", 1)) as site:
        for _ in range(3):
            status, _, body = site.ask("/metrics", site.bearer())
            assert (status, body) == (500, "The status page has a fault; the run goes on.\n")
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert site.token not in caplog.text


def test_a_page_that_dies_takes_nothing_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[dict[str, Any]] = []
    page = StatusPage("127.0.0.1:0", told.append)
    (tmp_path / "operator").mkdir()
    page.start(SimpleNamespace(folder=tmp_path), None)  # type: ignore[arg-type]
    until(lambda: caplog.records, "the page to die")
    page.report({"event": "wait"})
    page.observe(None)  # type: ignore[arg-type]
    page.close()
    assert [event["event"] for event in told] == ["status_page", "wait"]
    assert len(caplog.records) == 1
    assert not page._happened


def test_without_a_page_there_is_no_thread_and_reports_go_where_they_went() -> None:
    told: list[dict[str, Any]] = []
    page = StatusPage("", told.append)
    before = threading.active_count()
    page.start(SimpleNamespace(), None)  # type: ignore[arg-type]
    page.report({"event": "wait"})
    page.observe(None)  # type: ignore[arg-type]
    assert (told, threading.active_count()) == ([{"event": "wait"}], before)
    assert not page._happened
    page.close()
