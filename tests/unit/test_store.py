"""The run folder: what is committed, what is refused, and what each kind of damage says."""

from __future__ import annotations

import ast
import copy
import errno
import inspect
import json
import math
import os
import pickle
import random
import re
import shutil
import sqlite3
import tempfile
import threading
import typing
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

import ps.store
from common.errors import RunFolderExists, RunFolderInUse, StoreDamaged, StoreUnwritable
from ps.coordinator import Coordinator
from ps.round_maker import RoundMaker
from ps.store import CommittedRound, EvaluationRecord, PreparedRound, RefusalCount, RoundMetrics, RunReader, RunStore

D = 1_000
CONFIGURATION = {"federation": {"clients": 5}, "training": {"learning_rate": 0.1}}


def vector(round_id: int) -> np.ndarray:
    return np.random.default_rng(round_id).standard_normal(D, dtype=np.float32)


def entry(round_id: int) -> str:
    return f'{{"round":{round_id},"σ":0.5}}'


def prepared(number: int, **changes) -> PreparedRound:
    return PreparedRound(
        **{
            "round_id": number,
            "theta": vector(number),
            "server_momentum": vector(1000 + number),
            "ledger_json": entry(number),
            "answered": 4,
            "notes": {"fresh_starts": [2]},
        }
        | changes
    )


def create(folder: Path, **changes) -> tuple[RunStore, CommittedRound]:
    arguments = {
        "run_id": "a-run",
        "configuration": CONFIGURATION,
        "fingerprint": "abc",
        "genesis_json": entry(0),
        "theta": vector(0),
    }
    return RunStore.create(folder, **arguments | changes)


@pytest.fixture
def folder(tmp_path):
    """A run of five committed rounds, at rest."""
    folder = tmp_path / "parent" / "run"
    store, _ = create(folder)
    with store:
        for round_id in range(1, 6):
            store.commit(prepared(round_id))
    return folder


@contextmanager
def database(folder: Path):
    with closing(sqlite3.connect(folder / "run.sqlite", isolation_level=None)) as connection:
        yield connection


def is_round(model: CommittedRound, round_id: int) -> bool:
    return (
        model.round_id == round_id
        and np.array_equal(model.theta, vector(round_id))
        and np.array_equal(model.server_momentum, vector(1000 + round_id) if round_id else np.zeros(D))
    )


# --- a round, committed


def test_the_initial_model_is_committed_with_its_ledger_row_and_zero_momentum(tmp_path):
    store, first = create(tmp_path / "run")
    with store:
        assert is_round(first, 0)
        assert store.ledger_rows() == [(0, entry(0), sha256(bytes(32) + entry(0).encode()).digest())]
        assert first.head == store.ledger_rows()[0][2]


def test_a_run_taken_up_again_is_where_it_was_left(folder):
    with RunStore.open(folder) as store:
        assert is_round(store.latest(), 5)
        assert (store.run_id, store.fingerprint, store.configuration) == ("a-run", "abc", CONFIGURATION)
        assert store.status().status == "running"
        assert is_round(store.commit(prepared(6)), 6)


def test_every_row_is_chained_to_all_before_it(folder):
    head = bytes(32)
    with RunStore.open(folder) as store:
        for round_id, (recorded_round, recorded, recorded_head) in enumerate(store.ledger_rows()):
            head = sha256(head + entry(round_id).encode("utf-8")).digest()
            assert (recorded_round, recorded, recorded_head) == (round_id, entry(round_id), head)
        assert store.latest().head == head
    assert RunReader(folder).verify() == head


def test_the_last_models_are_kept_and_readable_by_anyone_with_safetensors(folder):
    assert sorted(os.listdir(folder / "models")) == [f"model-{kept}.safetensors" for kept in (3, 4, 5)]
    tensors = load_file(folder / "models" / "model-4.safetensors")
    assert np.array_equal(tensors["theta"], vector(4))
    assert np.array_equal(tensors["server_momentum"], vector(1004))


def test_a_large_model_is_kept_like_a_small_one(tmp_path):
    theta = np.random.default_rng(0).standard_normal(300_000, dtype=np.float32)
    store, _ = create(tmp_path / "run", theta=theta)
    with store:
        store.commit(PreparedRound(1, theta[::-1], theta, "{}"))
    with RunStore.open(tmp_path / "run") as store:
        assert np.array_equal(store.latest().theta, theta[::-1])
        assert np.array_equal(store.latest().server_momentum, theta)


def test_what_is_committed_does_not_change_with_the_buffers_it_was_made_from(tmp_path):
    store, first = create(tmp_path / "run", theta=(theta := vector(0)))
    theta[:] = 7.0
    assert is_round(first, 0)
    for array in (first.theta, first.server_momentum):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1.0
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.setflags(write=True)
    store.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"round_id": 2}, "round 2 was prepared; next is 1"),
        ({"round_id": 0}, "next is 1"),
        ({"theta": vector(1)[:9], "server_momentum": vector(1)[:9]}, "9 parameters; this run has 1000"),
    ],
)
def test_a_round_of_another_number_or_size_is_not_committed(tmp_path, changes, reason):
    store, _ = create(tmp_path / "run")
    with store:
        with pytest.raises(ValueError, match=reason):
            store.commit(prepared(1, **changes))
        assert is_round(store.latest(), 0)
        assert is_round(store.commit(prepared(1)), 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"theta": vector(1).astype(np.float64)},
        {"server_momentum": vector(1)[:9]},
        {"theta": vector(1).reshape(10, 100)},
        {"ledger_json": ""},
    ],
)
def test_a_round_without_ledger_row_or_with_wrong_vectors_cannot_be_prepared(changes):
    with pytest.raises(ValueError, match=r"expected float32|no model leaves"):
        prepared(1, **changes)


# --- only the store makes a committed round


def test_a_committed_round_cannot_be_made_anywhere_else(tmp_path):
    store, first = create(tmp_path / "run")
    with store:
        with pytest.raises(TypeError, match=r"RunStore\.create, commit or latest only"):
            CommittedRound(1, vector(1), vector(1), bytes(32))
        for forge in (copy.copy, copy.deepcopy, pickle.dumps, lambda model: copy.replace(model, round_id=1)):
            with pytest.raises((TypeError, AttributeError)):
                forge(first)
        with pytest.raises(TypeError, match="subclassed"):
            type("Forged", (CommittedRound,), {})
        with pytest.raises(AttributeError, match="does not change"):
            first.round_id = 1
        with pytest.raises(AttributeError, match="does not change"):
            del first.head
        assert not hasattr(first, "__dict__")


def test_the_seal_of_a_committed_round_is_named_in_the_stores_own_module_only():
    root = Path(ps.store.__file__).parent.parent
    sources = [
        path
        for package in ("ps", "common", "client", "adversary", "deploy")
        for path in root.glob(f"{package}/**/*.py")
    ]
    assert len(sources) > 100
    for path in sources:
        words = {
            word
            for node in ast.walk(ast.parse(path.read_text()))
            for word in (getattr(node, field, None) for field in ("id", "attr", "arg", "name"))
            if isinstance(word, str)
        }
        assert ("_SEAL" in words) == (path == Path(ps.store.__file__)), path
        assert not words & {"seal"} or path == Path(ps.store.__file__), path


def test_what_clients_are_sent_is_made_of_a_committed_round_and_in_one_place():
    hints = typing.get_type_hints(Coordinator._publish) | {"made": typing.get_type_hints(RoundMaker.make)["return"]}
    assert hints["committed"] is CommittedRound
    assert hints["made"] is CommittedRound
    assert typing.get_type_hints(RunStore.commit)["return"] is CommittedRound
    text = Path(inspect.getfile(Coordinator)).read_text()
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    filled = {
        function.name
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr == "_broadcast" and isinstance(node.ctx, ast.Store)
    }
    assert filled == {"__init__", "_publish"}
    assert not re.search(r"\bcast\(", text)
    assert "type: ignore" not in text
    with pytest.raises(AttributeError, match="head"):  # a round that is only prepared lacks what a model travels with
        Coordinator._publish(SimpleNamespace(members=SimpleNamespace(schema_hash=bytes(32))), prepared(1))


# --- creating


@pytest.mark.parametrize("finished", [False, True])
def test_a_folder_with_a_run_is_refused_with_both_ways_out_and_left_as_it_is(folder, finished):
    if finished:
        with RunStore.open(folder) as store:
            store.finish("completed")
    with pytest.raises(RunFolderExists, match=r"--resume.*--run-dir"):
        create(folder, run_id="another", configuration={})
    with RunStore.open(folder) as store:
        assert store.run_id == "a-run"
        assert is_round(store.latest(), 5)
    assert json.loads((folder / "experiment.json").read_text()) == CONFIGURATION


def test_a_folder_with_other_files_may_hold_a_run_and_they_stay(tmp_path):
    (tmp_path / "run" / "operator").mkdir(parents=True, mode=0o755)
    (tmp_path / "run" / "operator" / "ps.log").write_text("started")
    store, _ = create(tmp_path / "run")
    store.close()
    assert (tmp_path / "run" / "operator" / "ps.log").read_text() == "started"
    assert (tmp_path / "run" / "operator").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "run" / "run.sqlite").stat().st_mode & 0o077 == 0


def test_a_database_of_something_else_is_refused_and_left_as_it_is(tmp_path):
    with closing(sqlite3.connect(tmp_path / "run.sqlite")) as connection:
        connection.execute("CREATE TABLE invoices (total)")
    with pytest.raises(RunFolderExists, match="not of a ByzULDP run"):
        create(tmp_path)
    with pytest.raises(StoreDamaged, match="not of a ByzULDP run"):
        RunStore.open(tmp_path)
    with pytest.raises(StoreDamaged, match="not of a ByzULDP run"):
        RunReader(tmp_path)
    with database(tmp_path) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("invoices",)]


def test_a_run_whose_database_was_deleted_is_not_begun_anew(folder):
    (folder / "run.sqlite").unlink()
    with pytest.raises(RunFolderExists, match=r"run\.sqlite is missing; restore"):
        create(folder)
    assert (folder / "models" / "model-5.safetensors").exists()


def test_a_folder_version_of_the_future_is_named(folder):
    with database(folder) as connection:
        connection.execute("PRAGMA user_version = 2")
    with pytest.raises(StoreDamaged, match=r"version 2 .* reads version 1"):
        RunStore.open(folder)


def test_a_run_id_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(StoreUnwritable, match=r"file.*choose another --run-dir"):
            create(place)


# --- damage


def _truncate(path: Path, size: int) -> None:
    os.truncate(path, size)


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def _edit(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DROP TRIGGER ledger_rows_stay")
        connection.execute("DROP TRIGGER ledger_rows_live")
        connection.execute(statement)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (
            "models/model-5.safetensors",
            lambda p: _truncate(p, 100),
            r"torn: 100 bytes, but \d+ were committed",
        ),
        ("models/model-5.safetensors", lambda p: _truncate(p, 0), "torn: 0 bytes"),
        ("models/model-5.safetensors", lambda p: _flip(p, -1), "changed since it was committed"),
        ("models/model-5.safetensors", lambda p: _flip(p, 20), "changed since it was committed"),
        ("models/model-5.safetensors", Path.unlink, "the model of the last committed round is missing; restore"),
        ("run.sqlite", Path.unlink, "holds no run to resume"),
        ("run.sqlite", lambda p: p.write_bytes(b"not a database, by far" * 100), "file is not a database.*restore"),
        ("run.sqlite", lambda p: _truncate(p, 8192), "restore"),
        ("run.sqlite", lambda p: _edit(p, "UPDATE ledger SET entry = '{}' WHERE round_id = 3"), "of round 3 .* chain"),
        ("run.sqlite", lambda p: _edit(p, "UPDATE ledger SET head = zeroblob(32) WHERE round_id = 4"), "of round 4"),
        ("run.sqlite", lambda p: _edit(p, "DELETE FROM ledger WHERE round_id = 2"), "row of round 2 is missing"),
        (
            "run.sqlite",
            lambda p: _edit(p, "DELETE FROM ledger WHERE round_id = 5"),
            "5 rows, but .* 6 models",
        ),
        ("run.sqlite", lambda p: _edit(p, "UPDATE run SET round_id = 4"), "run is at round 4"),
        ("experiment.json", lambda p: p.write_text('{"federation": {}}'), "not the configuration .* delete the file"),
        ("experiment.json", lambda p: p.write_text("{"), "not the configuration"),
    ],
)
def test_damage_is_named_with_its_file_and_nothing_is_lost_once_it_is_undone(folder, tmp_path, file, damage, message):
    backup = shutil.copytree(folder, tmp_path / "backup")
    damage(folder / file)
    with pytest.raises(StoreDamaged, match=re.compile(message)) as refusal:
        RunStore.open(folder)
    assert str(folder) in str(refusal.value)
    assert Path(file).name in str(refusal.value)
    shutil.copyfile(backup / file, folder / file)
    with RunStore.open(folder) as store:
        assert is_round(store.latest(), 5)
        assert is_round(store.commit(prepared(6)), 6)


def test_a_database_older_than_its_folder_is_refused_before_anything_is_deleted(tmp_path):
    store, _ = create(tmp_path / "run")
    store.close()
    snapshot = (tmp_path / "run" / "run.sqlite").read_bytes()
    with RunStore.open(tmp_path / "run") as store:
        for round_id in range(1, 5):
            store.commit(prepared(round_id))
    (tmp_path / "run" / "run.sqlite").write_bytes(snapshot)
    with pytest.raises(StoreDamaged, match=r"ends at round 0, but models/ holds round 4.*release rounds twice"):
        RunStore.open(tmp_path / "run")
    assert sorted(os.listdir(tmp_path / "run" / "models")) == [f"model-{kept}.safetensors" for kept in (2, 3, 4)]


def test_a_database_that_forgot_its_last_round_is_refused_since_that_round_would_be_noised_again(tmp_path):
    store, _ = create(tmp_path / "run")
    with store:
        for round_id in range(1, 6):
            before = (tmp_path / "run" / "run.sqlite-wal").read_bytes()
            store.commit(prepared(round_id))
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
    killed = tmp_path / "killed"
    whole = (killed / "run.sqlite-wal").read_bytes()
    assert whole.startswith(before[: len(before) // 2])
    for damaged in (whole[:-1], whole[: len(before)], whole[: len(before) + 100] + b"x" + whole[len(before) + 101 :]):
        (killed / "run.sqlite-wal").write_bytes(damaged)
        files = snapshot(killed)
        with pytest.raises(StoreDamaged, match=r"ends at round 4, but models/ holds round 5.*-wal file.*twice"):
            RunStore.open(killed)
        assert snapshot(killed) == files, "what might still be restored was touched"
    (killed / "run.sqlite-wal").write_bytes(whole)
    with RunStore.open(killed) as store:
        assert is_round(store.latest(), 5)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file that says something about the run."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("lock", "run.sqlite-shm")
    }


@pytest.mark.parametrize("table", ["run", "ledger", "models"])
def test_a_flipped_bit_of_the_database_is_refused_by_name_or_changes_nothing(folder, table):
    whole = (folder / "run.sqlite").read_bytes()
    with database(folder) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", [table]).fetchone()
    size = 4096
    used = [at for at in range((page - 1) * size, page * size) if whole[at]]
    dice, refused = random.Random(table), 0
    for at in dice.sample(used, 40):
        data = bytearray(whole)
        data[at] ^= 1 << dice.randrange(8)
        (folder / "run.sqlite").write_bytes(data)
        try:
            with RunStore.open(folder) as store:
                latest, rows = store.latest(), store.ledger_rows()
                if store.configuration != CONFIGURATION:
                    pytest.fail("the configuration was changed unnoticed")
            assert is_round(latest, 5)
            assert [text for _, text, _ in rows] == [entry(number) for number in range(6)]
        except StoreDamaged as damage:
            refused += any(name in str(damage) for name in ("run.sqlite", "model-5", "experiment.json"))
    assert refused > {"run": 10, "ledger": 30, "models": 0}[table]
    assert {path.name for path in (folder / "models").iterdir()} == {f"model-{t}.safetensors" for t in (3, 4, 5)}


def test_a_lost_copy_of_the_configuration_is_written_again(folder):
    (folder / "experiment.json").unlink()
    RunStore.open(folder).close()
    assert json.loads((folder / "experiment.json").read_text()) == CONFIGURATION


def test_what_an_interrupted_round_left_is_removed_when_the_run_is_taken_up(folder):
    (folder / "models" / "model-6.safetensors.prepared").write_bytes(b"uncommitted")
    (folder / "models" / "model-6.safetensors.prepared.tmp").write_bytes(b"torn")
    (folder / "models" / "notes.txt").write_text("mine")
    RunStore.open(folder).close()
    kept = [f"model-{kept}.safetensors" for kept in (3, 4, 5)]
    assert sorted(os.listdir(folder / "models")) == [*kept, "notes.txt"]


def test_ledger_rows_can_be_neither_changed_nor_deleted_by_a_slip(folder):
    with database(folder) as connection:
        for statement in ("UPDATE ledger SET entry = '{}'", "DELETE FROM ledger"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                connection.execute(statement)


# --- failures while committing


@pytest.mark.parametrize("point", ["before_tensor", "tensor_written", "tensor_renamed", "before_commit"])
def test_a_commit_that_meets_a_full_disk_commits_nothing_and_may_be_tried_again(tmp_path, point):
    failing = False

    def fault(here):
        if failing and here == point:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store, _ = create(tmp_path / "run", fault=fault)
    with store:
        store.commit(prepared(1))
        failing = True
        with pytest.raises((StoreUnwritable, OSError), match="No space left"):
            store.commit(again := prepared(2))
        assert is_round(store.latest(), 1)
        assert len(store.ledger_rows()) == 2
        assert not list(tmp_path.rglob("*.tmp"))
        failing = False
        assert is_round(store.commit(again), 2)
    with RunStore.open(tmp_path / "run") as store:
        assert is_round(store.latest(), 2)


def test_a_file_system_that_refuses_to_write_is_named_with_a_remedy(tmp_path):
    def fault(here):
        if here == "tensor_written":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    message = r"model-0\.safetensors: cannot write the model: Read-only.*make the folder"
    with pytest.raises(StoreUnwritable, match=message):
        create(tmp_path / "run", fault=fault)


class FailingCommit:
    """A connection whose COMMIT reports an error, after or before it took place."""

    def __init__(self, connection, *, lands: bool):
        self._connection, self._lands = connection, lands

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def execute(self, statement, *values):
        if statement == "COMMIT":
            if self._lands:
                self._connection.execute("COMMIT")
            raise sqlite3.OperationalError("disk I/O error")
        return self._connection.execute(statement, *values)


@pytest.mark.parametrize("lands", [False, True])
def test_a_commit_in_doubt_ends_the_server_and_the_file_decides(tmp_path, lands):
    store, _ = create(tmp_path / "run")
    with store:
        store._journal = FailingCommit(store._journal, lands=lands)
        with pytest.raises(StoreUnwritable, match="disk I/O error"):
            store.commit(prepared(1))
        store._journal = store._journal._connection
        with pytest.raises(StoreDamaged, match=r"only the file knows.*--resume"):
            store.commit(prepared(1, theta=vector(77)))  # another noise for the same round: never
    with RunStore.open(tmp_path / "run") as store:
        assert is_round(store.latest(), 1 if lands else 0)


@contextmanager
def as_nobody():
    """Root may write anywhere: become a user who may not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def read_only():
    """Make a folder read-only, in a place that another user can reach."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)

        def protect(folder: Path, leave: tuple[str, ...] = ()) -> Path:
            copied = Path(shutil.copytree(folder, Path(place) / "run"))
            for path in [copied, *copied.rglob("*")]:
                if os.geteuid() == 0:
                    os.chown(path, 65534, 65534)
                path.chmod(0o500 if path.is_dir() else 0o400)
            return copied

        yield protect
        for path in [Path(place) / "run", *Path(place).rglob("*")]:
            if path.is_dir():
                path.chmod(0o700)


def test_a_read_only_folder_is_refused_for_writing_and_read_all_the_same(folder, read_only):
    with RunStore.open(folder) as store:
        store.record_round(RoundMetrics(5, 1.0, 0.5))
    copied = read_only(folder)
    with as_nobody():
        with pytest.raises(StoreUnwritable, match=r"lock.*Permission denied.*make the folder writable"):
            RunStore.open(copied)
        with pytest.raises(StoreUnwritable, match=r"Permission denied.*make the folder writable"):
            create(copied / "below")
        reader = RunReader(copied)
        assert reader.status().round_id == 5
        assert len(reader.ledger_rows()) == 6
        assert [row.round_id for row in reader.rounds()] == [5]


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_read_only_copy_of_a_run_in_progress_is_read_with_its_latest_rounds(tmp_path, read_only, shared_memory):
    store, _ = create(tmp_path / "run")
    with store:
        store.commit(prepared(1))
        assert (tmp_path / "run" / "run.sqlite-wal").stat().st_size > 0
        copied = read_only(tmp_path / "run")
    if not shared_memory:
        copied.chmod(0o700)
        (copied / "run.sqlite-shm").unlink()
        copied.chmod(0o500)
    with as_nobody():
        assert RunReader(copied).status().round_id == 1


# --- one server at a time


def test_a_second_server_on_the_folder_is_refused_with_the_process_that_has_it(folder):
    with RunStore.open(folder) as store:
        with pytest.raises(RunFolderInUse, match=rf"process {os.getpid()}\b.*--run-dir"):
            RunStore.open(folder)
        with pytest.raises(RunFolderInUse, match=str(os.getpid())):
            create(folder)
        assert is_round(store.commit(prepared(6)), 6)
    RunStore.open(folder).close()


def test_a_refused_folder_is_not_left_locked(folder):
    (folder / "experiment.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(StoreDamaged):
            RunStore.open(folder)
    with pytest.raises(RunFolderExists):
        create(folder)
    (folder / "experiment.json").unlink()
    RunStore.open(folder).close()


def test_a_closed_store_commits_nothing(folder):
    store = RunStore.open(folder)
    store.close()
    store.close()
    for use in (lambda: store.commit(prepared(6)), lambda: store.finish("completed"), store.ledger_rows):
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_a_store_made_in_one_thread_is_used_in_others(folder):
    store, failures = RunStore.open(folder), []

    def use():
        try:
            store.commit(prepared(store.latest().round_id + 1))
            store.record_refusals([RefusalCount("late", 1, 1, 6, 6)])
        except BaseException as error:
            failures.append(error)

    for _ in range(2):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    assert not failures
    assert is_round(store.latest(), 7)
    store.close()


# --- metrics and status


def test_what_is_recorded_is_read_back_by_store_and_reader_while_the_run_goes_on(tmp_path):
    store, _ = create(tmp_path / "run")
    with store:
        metrics = RoundMetrics(1, 1000.5, 0.25, {"aggregate": 0.1, "noise": 0.0}, 3, (2, 4), 500, 400)
        store.record_round(RoundMetrics(1, 999.0, 9.0))  # the try that a crash cut short
        store.record_round(metrics)
        store.record_evaluation(1, 0.8, math.nan, 10_000)
        for round_id in (1, 2):
            one = RefusalCount("late", 3, 1, round_id, round_id)
            store.record_refusals([one, RefusalCount("unknown_client", None, 2, round_id, round_id)])
        reader = RunReader(tmp_path / "run")
        for source in (store, reader):  # the store first: asking it waits for what is still to be written
            assert source.rounds() == [metrics]
            assert [(e.round_id, e.accuracy, e.images) for e in source.evaluations()] == [(1, 0.8, 10_000)]
            assert math.isnan(source.evaluations()[0].loss)
            assert source.refusals() == [
                RefusalCount("late", 3, 2, 1, 2),
                RefusalCount("unknown_client", None, 4, 1, 2),
            ]
        store.record_evaluation(1, 0.9, 0.5, 10_000)
        assert reader.evaluations() == [EvaluationRecord(1, 0.9, 0.5, 10_000)]
        store.commit(prepared(1))
        assert reader.status().round_id == 1
        assert (reader.run.run_id, reader.run.configuration, reader.run.parameters) == ("a-run", CONFIGURATION, D)


def test_what_is_for_the_operator_lies_where_only_the_operator_looks(tmp_path):
    store, _ = create(tmp_path / "run")
    with store:
        store.record_round(RoundMetrics(1, 0.0, 0.1, missing=(3,)))
        store.record_refusals([RefusalCount("late", 3, 1, 1, 1)])
    assert not list((tmp_path / "run" / "public").iterdir())
    assert (tmp_path / "run" / "operator" / "metrics.sqlite").exists()
    assert (tmp_path / "run" / "operator").stat().st_mode & 0o777 == 0o700


def test_no_column_holds_an_epsilon(folder):
    for file in ("run.sqlite", "operator/metrics.sqlite"):
        with closing(sqlite3.connect(folder / file)) as connection:
            schema = " ".join(sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql NOT NULL"))
        assert "epsilon" not in schema


def test_lost_metrics_do_not_stop_a_run(folder):
    (folder / "operator" / "metrics.sqlite").unlink()
    assert RunReader(folder).rounds() == []
    with RunStore.open(folder) as store:
        assert store.rounds() == []
        assert is_round(store.commit(prepared(6)), 6)


def test_damaged_metrics_are_named(folder):
    (folder / "operator" / "metrics.sqlite").write_bytes(b"x" * 5000)
    with pytest.raises(StoreDamaged, match=r"metrics\.sqlite: .*not a database; .*move"):
        RunStore.open(folder)
    with pytest.raises(StoreDamaged, match=r"metrics\.sqlite"):
        RunReader(folder).rounds()
    assert RunReader(folder).status().round_id == 5


def test_how_a_run_ended_is_kept_until_it_goes_on(folder):
    with RunStore.open(folder) as store:
        store.finish("quorum_lost", "waited for 3 of 5")
        with pytest.raises(KeyError):
            store.finish("bored")
    status = RunReader(folder).status()
    assert (status.status, status.message, status.round_id) == ("quorum_lost", "waited for 3 of 5", 5)
    with RunStore.open(folder) as store:
        assert store.status().status == "quorum_lost"
        store.commit(prepared(6))
        assert (store.status().status, store.status().message) == ("running", "")


def test_a_folder_without_a_run_cannot_be_read(tmp_path):
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(StoreDamaged, match="not a run folder"):
            RunReader(place)
        with pytest.raises(StoreDamaged, match="holds no run to resume"):
            RunStore.open(place)
    assert not list(tmp_path.iterdir())
