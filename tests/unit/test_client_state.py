"""A client's state file: whole or refused, one process at a time; and what is kept in it when."""

import asyncio
import errno
import json
import logging
import math
import os
import threading

import numpy as np
import pytest

from client import state as state_module
from client.keeper import Keeper, refuse_limit_without_state
from client.lifetime import Charge, Lifetime
from client.memory import NEVER, Held, Outcome, RunTerms, Seen
from client.state import Contents, StateFile, decode, encode
from common.config import experiment_from
from common.errors import PrivacyError, RunFolderInUse, StoreDamaged, StoreUnwritable

HEAD, OTHER_HEAD = bytes(range(32)), bytes(32)
SERVER = "ps.example:5000"
D = 3


def vector(*values):
    return np.array(values, dtype=np.float32)


CONTENTS = Contents(
    run_id="run-1",
    momenta={3: Held(17, vector(0.1, -2.0, 1e-30)), 11: Held(16, vector(np.pi, 0.0, -0.0))},
    seen={"run-1": Seen(18, HEAD), "run-0": Seen(4, OTHER_HEAD)},
    lifetime=Lifetime((Charge.planned("run-1", SERVER, 3.7, 100, discrete=False),)),
)


def assert_same(found, expected):
    assert (found.run_id, found.seen, found.lifetime) == (expected.run_id, expected.seen, expected.lifetime)
    assert found.momenta.keys() == expected.momenta.keys()
    for client_id, held in expected.momenta.items():
        assert found.momenta[client_id].round_id == held.round_id
        assert found.momenta[client_id].momentum.tobytes() == held.momentum.tobytes()


@pytest.fixture(autouse=True)
def records_reach_the_test(monkeypatch):
    monkeypatch.setattr(logging.getLogger("byzuldp"), "propagate", True)  # an entry point turns it off


@pytest.fixture
def path(tmp_path):
    return tmp_path / "client-0.state"


@pytest.fixture
def stored(path):
    with StateFile(path) as file:
        file.write(CONTENTS)
    return path


# ---------------------------------------------------------------- the file


def test_what_is_written_is_read_back_bit_for_bit(stored):
    with StateFile(stored) as file:
        assert_same(file.contents, CONTENTS)


def test_a_new_state_is_empty(path):
    with StateFile(path) as file:
        assert_same(file.contents, Contents())


def test_only_the_owner_may_read_it_even_when_a_killed_process_left_a_readable_half(path):
    half = path.with_name(path.name + ".tmp")
    half.write_bytes(b"half")
    half.chmod(0o644)
    with StateFile(path) as file:
        file.write(CONTENTS)
        file.note("run-1", Seen(19, HEAD))
    assert {entry.name: entry.stat().st_mode & 0o777 for entry in path.parent.iterdir()} == {
        "client-0.state": 0o600,
        "client-0.state.seen": 0o600,
    }


def test_it_is_an_ordinary_safetensors_file(stored):
    from safetensors.numpy import load_file

    assert load_file(stored).keys() == {"m.3", "m.11"}


def test_every_truncation_is_noticed():
    data = encode(CONTENTS)
    for length in range(len(data)):
        with pytest.raises(ValueError, match=r"torn|not those of"):
            decode(data[:length])


def test_every_changed_byte_is_noticed():
    data = bytearray(encode(CONTENTS))
    for position in range(len(data)):
        for bit in (1, 128):
            data[position] ^= bit
            with pytest.raises(ValueError, match=r"torn|not those of"):
                decode(bytes(data))
            data[position] ^= bit
    assert_same(decode(bytes(data)), CONTENTS)


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda data: data[:7],
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:40] + b"\xff" + data[41:],
        lambda _: (3).to_bytes(8, "little") + b"[1]",
        lambda _: encode(Contents(run_id="x")).replace(b"run_id", b"run-id"),
    ],
    ids=["empty", "in the length", "in the header", "in the tensors", "longer", "changed", "a list", "edited"],
)
def test_a_damaged_state_is_refused_with_the_remedy_and_left_as_it_is(stored, damage):
    broken = damage(stored.read_bytes())
    stored.write_bytes(broken)
    with pytest.raises(StoreDamaged) as refused:
        StateFile(stored)
    for said in (str(stored), "Restore it from a backup", "privacy total", "client-0.state.seen"):
        assert said in str(refused.value)
    assert stored.read_bytes() == broken
    with pytest.raises(StoreDamaged):  # and not as in use: the lock is free again
        StateFile(stored)


def test_a_state_of_another_version_is_refused(stored, monkeypatch):
    monkeypatch.setattr(state_module, "FORMAT", 2)
    with pytest.raises(StoreDamaged, match="it has format 1, this version reads 2"):
        StateFile(stored)


def test_a_state_that_is_gone_is_not_taken_for_a_new_one(stored):
    with StateFile(stored) as file:
        file.note("run-1", Seen(19, HEAD))
    stored.unlink()
    with pytest.raises(StoreDamaged, match=r"is missing, and client-0\.state\.seen shows that there was one"):
        StateFile(stored)
    stored.with_name("client-0.state.seen").unlink()
    StateFile(stored).close()


def test_a_second_process_is_refused_and_told_which_one_has_it(path):
    with StateFile(path), pytest.raises(RunFolderInUse, match=rf"another client process \({os.getpid()}\)"):
        StateFile(path)
    StateFile(path).close()


@pytest.mark.parametrize("place", ["no such folder/client.state", "a file/client.state"])
def test_a_place_where_nothing_can_be_written_is_refused(tmp_path, place):
    (tmp_path / "a file").touch()
    with pytest.raises(StoreUnwritable, match=r"cannot open the client's state: .*--state"):
        StateFile(tmp_path / place)


def test_a_full_disk_leaves_the_old_state(stored, monkeypatch):
    def full(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with StateFile(stored) as file:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StoreUnwritable, match="No space left on device; free some space"):
            file.write(Contents())
        monkeypatch.undo()
        assert_same(file.contents, CONTENTS)
    with StateFile(stored) as file:
        assert_same(file.contents, CONTENTS)


# ---------------------------------------------------------------- the latest round seen


def test_the_latest_round_seen_is_kept_without_writing_the_state(stored):
    before = stored.read_bytes()
    with StateFile(stored) as file:
        for round_id in range(19, 30):
            file.note("run-1", Seen(round_id, HEAD))
    assert stored.read_bytes() == before
    with StateFile(stored) as file:
        assert file.contents.seen == {"run-1": Seen(29, HEAD), "run-0": Seen(4, OTHER_HEAD)}


def test_of_two_memories_of_a_run_the_later_counts(stored):
    for noted, kept in ((2, 18), (20, 20)):
        with StateFile(stored) as file:
            file.note("run-1", Seen(noted, OTHER_HEAD))
        with StateFile(stored) as file:
            assert file.contents.seen["run-1"].round_id == kept


def test_a_torn_note_is_said_and_the_states_own_counts(stored, caplog):
    with StateFile(stored) as file:
        file.note("run-1", Seen(29, HEAD))
    noted = stored.with_name("client-0.state.seen")
    noted.write_bytes(noted.read_bytes()[:600])
    with caplog.at_level(logging.WARNING, "byzuldp.client"), StateFile(stored) as file:
        assert file.contents.seen["run-1"] == Seen(18, HEAD)
    assert "as after a power failure" in caplog.text


# ---------------------------------------------------------------- what is kept, and when


class Pretended:
    """A worker, as far as its memory goes."""

    def __init__(self):
        self.held = Held(-1, np.zeros(D, dtype=np.float32))

    def restore(self, held):
        self.held = held


def experiment(*, persist_every=10, noise_seed=None, **client):
    privacy = {"epsilon": 4.0} if noise_seed is None else {"epsilon": 4.0, "noise_seed": noise_seed}
    return experiment_from(
        {
            "federation": {"clients": 20},
            "training": {"rounds": 100},
            "privacy": privacy,
            "client": {"persist_every": persist_every, **client},
        }
    )


class Life:
    """One life of a client process with some identities."""

    def __init__(self, path, ids=(3, 11), *, d=D, **settings):
        self.crew = {client_id: Pretended() for client_id in ids}
        self.path = path
        self.keeper = Keeper(path, self.crew, experiment(**settings), server=SERVER, num_parameters=d)

    def __enter__(self):
        self.keeper.__enter__()
        return self

    def __exit__(self, *_):
        self.keeper.__exit__(None, None, None)

    def join(self, run_id="run-1", z=10.0, rounds=100):
        return asyncio.run(self.keeper.joined(RunTerms(run_id, z, rounds)))

    def train(self, rounds):
        for round_id in rounds:
            for client_id, worker in self.crew.items():
                worker.held = Held(round_id, vector(round_id, client_id, 0))
            self.keeper.round_done()

    def end(self, status=None, releases=None):
        asyncio.run(self.keeper.finished(None if status is None else Outcome(status, "", releases)))

    @property
    def rounds(self):
        return {client_id: worker.held.round_id for client_id, worker in self.crew.items()}

    @property
    def on_disk(self):
        return decode(self.path.read_bytes())


def test_a_runs_cost_is_on_the_disk_before_anything_is_sent(path):
    with Life(path) as life:
        assert life.join() == NEVER
        (charge,) = life.on_disk.lifetime.charges
    assert charge == Charge("run-1", (SERVER,), 10.0, 100, 100)


def test_momenta_heads_and_totals_live_on(path):
    with Life(path) as life:
        life.join()
        life.keeper.saw("run-1", Seen(7, HEAD))
        life.train(range(7))
        life.end()
    with Life(path) as life:
        assert life.join() == Seen(7, HEAD)
        assert life.rounds == {3: 6, 11: 6}
        np.testing.assert_array_equal(life.crew[11].held.momentum, vector(6, 11, 0))
        assert len(life.on_disk.lifetime.charges) == 1


def test_momenta_are_written_every_few_rounds_by_another_thread(path, monkeypatch):
    writers = []
    monkeypatch.setattr(StateFile, "write", lambda _, contents: writers.append((threading.get_ident(), contents)))
    with Life(path, persist_every=4) as life:
        life.join()
        for first in range(0, 12, 4):
            life.train(range(first, first + 4))
            life.keeper._writing.result()
    threads, written = zip(*writers, strict=True)
    assert threading.get_ident() not in threads
    assert [contents.momenta[3].round_id for contents in written[1:]] == [3, 7, 11]


def test_training_never_waits_for_the_disk(path, monkeypatch):
    free, writing = threading.Event(), []

    def slow(self, contents):
        writing.append(contents)
        assert free.wait(30)

    with Life(path, persist_every=2) as life:
        life.join()
        monkeypatch.setattr(StateFile, "write", slow)
        life.train(range(50))  # would hang here
        assert len(writing) <= 1  # nor do writes pile up
        free.set()
        life.keeper._writing.result()
        life.train(range(50, 51))
        life.keeper._writing.result()
    assert [contents.momenta[3].round_id for contents in writing] == [1, 50]


def test_a_disk_that_is_full_for_a_while_is_said_and_ends_nothing(path, monkeypatch, caplog):
    with Life(path, persist_every=1) as life:
        life.join()
        monkeypatch.setattr(state_module, "write_durably", _raise_full)
        with caplog.at_level(logging.WARNING, "byzuldp.client"):
            life.train(range(1))
            life.keeper._writing.result()
        assert "No space left" in caplog.text
        monkeypatch.undo()
        life.train(range(1, 2))
        life.keeper._writing.result()
        assert life.on_disk.momenta[3].round_id == 1


def _raise_full(*_args, **_keywords):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_without_a_written_reservation_nothing_is_sent(path, monkeypatch):
    with Life(path) as life:
        monkeypatch.setattr(state_module, "write_durably", _raise_full)
        with pytest.raises(StoreUnwritable):
            life.join()


def test_a_state_of_another_run_is_left_aside_but_for_its_total(path, caplog):
    with Life(path) as life:
        life.join("run-1")
        life.keeper.saw("run-1", Seen(5, HEAD))
        life.train(range(5))
        life.end()
    with Life(path) as life, caplog.at_level(logging.INFO, "byzuldp.client"):
        assert life.join("run-2") == NEVER
        assert life.rounds == {3: -1, 11: -1}
        assert [charge.run_id for charge in life.on_disk.lifetime.charges] == ["run-1", "run-2"]
        life.end()
    assert "its momenta are of run run-1 and are left aside" in caplog.text
    with Life(path) as life:  # and the first run is still remembered
        assert life.join("run-1") == Seen(5, HEAD)


@pytest.mark.parametrize(
    ("ids", "d", "found"), [((3, 4), D, {3: 4, 4: -1}), ((3, 11), D + 1, {3: -1, 11: -1}), ((0,), D, {0: -1})]
)
def test_momenta_of_other_identities_or_another_model_are_left_aside(path, caplog, ids, d, found):
    with Life(path) as life:
        life.join()
        life.train(range(5))
        life.end()
    with Life(path, ids, d=d) as life, caplog.at_level(logging.INFO, "byzuldp.client"):
        life.join()
        assert life.rounds == found
    assert "are left aside: this process holds clients" in caplog.text


# ---------------------------------------------------------------- the total


@pytest.mark.parametrize(
    ("status", "releases", "charged", "settled"),
    [
        ("completed", 100, 100, True),
        ("completed", None, 100, True),
        ("budget_exhausted", 41, 41, True),
        ("budget_exhausted", None, 100, True),
        ("interrupted", 41, 100, False),  # these three can be resumed, with this client or without
        ("quorum_lost", 41, 100, False),
        ("failed", 41, 100, False),
        (None, None, 100, False),
    ],
)
def test_a_run_is_charged_in_full_unless_it_is_over_for_good_sooner(path, status, releases, charged, settled):
    with Life(path) as life:
        life.join()
        life.end(status, releases)
        (charge,) = life.on_disk.lifetime.charges
    assert (charge.releases, charge.settled) == (charged, settled)


def test_a_run_beyond_the_limit_is_refused_and_leaves_no_trace(path):
    with Life(path, lifetime_epsilon=5.0) as life:
        life.join("run-1")
        life.end("completed", 100)
        before = path.read_bytes()
    with Life(path, lifetime_epsilon=5.0) as life:
        with pytest.raises(PrivacyError, match=r"run run-2 is refused: client\.lifetime_epsilon = 5"):
            life.join("run-2")
        life.end()
        assert path.read_bytes() == before
    with Life(path, lifetime_epsilon=10.0) as life:
        life.join("run-2")


def test_the_end_tells_the_total(path, caplog):
    with Life(path) as life, caplog.at_level(logging.INFO, "byzuldp.client"):
        life.join()
        life.end("completed", 100)
    assert f"all runs with the parameter server {SERVER} so far: epsilon = 4.377 at delta = 1e-05" in caplog.text


def test_noise_from_a_known_seed_is_no_noise(path):
    with Life(path, noise_seed=3) as life:
        life.join()
        assert life.on_disk.lifetime.epsilon(SERVER, 1e-5) == math.inf
    with Life(path, noise_seed=3, lifetime_epsilon=100.0) as life, pytest.raises(PrivacyError):
        life.join("run-2")


def test_a_limit_needs_a_state(path):
    with pytest.raises(PrivacyError, match="name its state file with --state"):
        refuse_limit_without_state(experiment(lifetime_epsilon=3.0), None)
    refuse_limit_without_state(experiment(lifetime_epsilon=3.0), path)
    refuse_limit_without_state(experiment(), None)


def test_the_record_holds_no_random_state():
    """Every sampling stream is keyed by (seed, purpose, client, round)."""
    header = encode(CONTENTS)
    record = json.loads(json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]["state"])
    assert record.keys() == {"format", "run_id", "rounds", "seen", "lifetime"}
