"""What makes a run folder last: the lock, SQLite connections, and errors in sentences.

Files are written by :mod:`common.durable`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sqlite3
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from common.durable import TEMPORARY, sync_directory
from common.errors import RunFolderInUse, StoreDamaged, StoreUnwritable

__all__ = [
    "FolderLock",
    "connect",
    "explaining",
    "reading",
    "transaction",
]

BUSY_S = 30.0

_NO_SPACE = "free some space, then continue with --resume; everything committed before is safe"
_NO_WRITING = "make the folder writable for this user, or choose another --run-dir"
_RESTORE = "restore the file from a backup of the whole run folder, or start a new run in another --run-dir"
_RETRY = "check the disk, then continue with --resume; everything committed before is safe"

_OS_REMEDIES = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EFBIG: _NO_SPACE,
    errno.EACCES: _NO_WRITING,
    errno.EPERM: _NO_WRITING,
    errno.EROFS: _NO_WRITING,
    errno.ENOENT: _RESTORE,
    errno.EISDIR: "move away what stands in its place, or choose another --run-dir",
    errno.ENOTDIR: "move away what stands in its place, or choose another --run-dir",
    errno.EEXIST: "move away what stands in its place, or choose another --run-dir",
    errno.ENOLCK: "put the run folder on a file system with locks (a local one)",
    errno.EOPNOTSUPP: "put the run folder on a file system with locks (a local one)",
}

# By prefix: SQLite refines its codes by suffixes (SQLITE_READONLY_DIRECTORY, SQLITE_CORRUPT_VTAB).
_SQLITE_REMEDIES = (
    ("SQLITE_FULL", _NO_SPACE),
    ("SQLITE_IOERR_SHM", _NO_SPACE),
    ("SQLITE_READONLY", _NO_WRITING),
    ("SQLITE_CANTOPEN", _NO_WRITING),
    ("SQLITE_PERM", _NO_WRITING),
    ("SQLITE_BUSY", "close the other program that has the database open, then continue with --resume"),
)

_NO_TEXT = "Could not decode to UTF-8"  # Python's own error, without a name


@contextmanager
def explaining(path: Path, doing: str, *, damaged: str = _RESTORE) -> Iterator[None]:
    """Turn an operating system's or SQLite's error into a sentence with file, cause and remedy.

    Parameters
    ----------
    path, doing
        The file in use, and what for.
    damaged
        The remedy when it turns out to be no intact database.

    Raises
    ------
    StoreUnwritable
        ``path`` could not be used for ``doing``.
    StoreDamaged
        It is no intact database.
    """
    try:
        yield
    except OSError as error:
        # The file named may be a neighbour of ours (its temporary file, its directory): the error knows better.
        place = error.filename if isinstance(error.filename, str) else path
        cause = error.strerror or str(error)
        remedy = _OS_REMEDIES.get(error.errno or 0, _RETRY)
        raise StoreUnwritable(f"{place}: cannot {doing}: {cause}; {remedy}") from error
    except sqlite3.Error as error:
        # Errors that SQLite did not raise itself (a value it cannot store) have no name.
        name = getattr(error, "sqlite_errorname", "") or ""
        remedy = next((text for prefix, text in _SQLITE_REMEDIES if name.startswith(prefix)), _RETRY)
        # Our statements are right: one that meets no such table or column (plain SQLITE_ERROR) meets a damaged schema.
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")) or name == "SQLITE_ERROR" or _NO_TEXT in str(error):
            remedy = damaged
        leaf = StoreDamaged if remedy is damaged else StoreUnwritable
        raise leaf(f"{path}: cannot {doing}: {error}; {remedy}") from error
    except UnicodeDecodeError as error:  # SQLite quotes the damaged text in its own message, and Python gives up on it
        raise StoreDamaged(f"{path}: cannot {doing}: it holds text that is not UTF-8; {damaged}") from error


class FolderLock:
    """One parameter server per run folder, by ``flock``: the kernel releases it however the process dies.

    The file holds the process id for the message only; the lock, not the file, decides.
    """

    _held: ClassVar[weakref.WeakSet[FolderLock]] = weakref.WeakSet()

    def __init__(self, path: Path) -> None:
        with explaining(path, "lock the run folder"):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
            except BlockingIOError:
                holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip()
                self.close()
                raise RunFolderInUse(
                    f"{path.parent}: another parameter server (process {holder or 'unknown'}) has this run folder "
                    "open; stop it, or choose another --run-dir"
                ) from None
            except BaseException:
                self.close()
                raise
        self._held.add(self)

    @property
    def held(self) -> bool:
        return self._descriptor >= 0

    def close(self) -> None:
        """Release the lock; closing twice does nothing."""
        if self.held:
            os.close(self._descriptor)
            self._descriptor = -1

    @classmethod
    def _after_fork(cls) -> None:
        # A forked child shares the open file: it would hold the lock on after its parent was killed, and a copy of
        # the store in it could commit rounds of its own.
        for lock in list(cls._held):
            lock.close()


os.register_at_fork(after_in_child=FolderLock._after_fork)


def connect(path: Path, *, synchronous: str, create: bool) -> sqlite3.Connection:
    """Open a database for writing, in WAL mode; transactions are ours to begin (:func:`transaction`).

    Parameters
    ----------
    synchronous
        ``"FULL"``: a commit is on the disk when it returns. ``"NORMAL"``: it survives the death of the process,
        and the last ones may be lost, without damage, when the machine loses power.
    create
        Whether a missing file is made, readable by its owner only.
    """
    if create and not path.exists():
        _make_database(path)
    connection = sqlite3.connect(
        f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False
    )
    try:
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise sqlite3.NotSupportedError(f"write-ahead logging is not possible here (journal mode {mode})")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
    except BaseException:
        connection.close()
        raise
    return connection


def _make_database(path: Path) -> None:
    """Put an empty database in WAL mode in place, in one step: a reader never meets one that needs repair."""
    temporary = path.with_name(path.name + TEMPORARY)
    for left in (temporary, temporary.with_name(temporary.name + "-journal")):
        left.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    temporary.replace(path)
    sync_directory(path.parent)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of it, or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        raise


@contextmanager
def reading(path: Path, *, damaged: str = _RESTORE) -> Iterator[sqlite3.Connection]:
    """A read-only connection, beside a server that writes, or in a folder where nothing may be written.

    SQLite has to write beside a WAL database in order to read it. Where it may not, a copy in a temporary folder is
    read: there is no writer then, since a writer's shared-memory file is all that SQLite needs.

    Raises
    ------
    StoreProblem
        There is no such database, or it cannot be read.
    """
    with explaining(path, "read the run's records", damaged=damaged):
        try:
            connection = _open_to_read(path)
        except sqlite3.OperationalError as error:
            refused = error.sqlite_errorname.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY"))
            # Never copy beside a writer: closing the file here would drop SQLite's locks if the writer is this process.
            if not refused or os.access(path.parent, os.W_OK, effective_ids=True):
                raise
        else:
            with closing(connection):
                yield connection
            return
        with tempfile.TemporaryDirectory(prefix="byzuldp-") as copies:
            shutil.copyfile(path, Path(copies, path.name))
            with suppress(FileNotFoundError):
                shutil.copyfile(f"{path}-wal", Path(copies, f"{path.name}-wal"))
            with closing(_open_to_read(Path(copies, path.name))) as connection:
                yield connection


def _open_to_read(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection
