"""The trimmed mean's kernels: the network, the code it becomes, and what happens where it cannot be compiled."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from common.aggregation import make_rule
from common.aggregation.kernels import compiled, dispatch, library
from common.aggregation.kernels.compiled import straight_line_kernel, table_kernel
from common.aggregation.kernels.cpp import straight_line_source, table_source
from common.aggregation.kernels.dispatch import VARIABLE, Dispatcher
from common.aggregation.kernels.network import network
from common.aggregation.kernels.plain import sorted_sum, sorted_sum_on_device
from common.errors import RuleError

ROOT = Path(__file__).parents[2]
TINY = 'extern "C" int answer() { return 42; }'
OTHER = 'extern "C" int answer() { return 43; }'


def has_compiler() -> bool:
    try:
        library._compiler()
    except library.Unavailable:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler here")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "byzuldp" / "kernels"


@pytest.fixture
def no_compiler(cache, monkeypatch, tmp_path):
    """An empty cache, an empty path, and nothing loaded before."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for function in (compiled._table_library, compiled.table_kernel, compiled.straight_line_kernel):
        function.cache_clear()
    yield
    for function in (compiled._table_library, compiled.table_kernel, compiled.straight_line_kernel):
        function.cache_clear()


# The network


def split(net, columns):
    """Apply the network to bits or values, (n, …), and return what ends among the low, the kept and the high."""
    wires = list(columns)
    unread = set()
    for c in net.comparators:
        assert not {c.low, c.high} & unread, "an output that was marked as not needed is read"
        smaller, larger = np.minimum(wires[c.low], wires[c.high]), np.maximum(wires[c.low], wires[c.high])
        wires[c.low], wires[c.high] = smaller, larger
        unread |= {wire for wire, needed in ((c.low, c.needs_low), (c.high, c.needs_high)) if not needed}
    assert not set(net.kept) & unread
    return np.array([wires[wire] for wire in net.kept])


SMALL = [(n, f) for n in range(1, 13) for f in range((n - 1) // 2 + 1)]


@pytest.mark.parametrize(("n", "f"), [*SMALL, (16, 2), (16, 7)])
def test_the_network_keeps_the_right_set_for_every_input_by_the_zero_one_principle(n, f):
    # A network of minima and maxima commutes with monotone maps, so that it is right for all inputs if it is for all
    # of 0 and 1: there the kept hold as many ones as the sorted ones would.
    bits = (np.arange(2**n) >> np.arange(n)[:, None]) & 1
    kept = split(network(n, f), bits.astype(np.int8)).sum(axis=0)
    assert np.array_equal(kept, np.clip(bits.sum(axis=0) - f, 0, n - 2 * f))


@pytest.mark.parametrize(
    ("n", "f"), [(20, 4), (20, 9), (21, 5), (50, 10), (53, 3), (99, 20), (100, 20), (300, 15), (257, 128), (700, 1)]
)
def test_a_large_network_keeps_the_right_set_of_random_inputs_with_ties(n, f):
    rng = np.random.default_rng(n)
    x = np.concatenate(
        [rng.integers(0, n, (n, 60)), rng.random((n, 60)).argsort(axis=0), rng.integers(0, 2, (n, 60))], 1
    )
    kept = np.sort(split(network(n, f), x), axis=0)
    assert np.array_equal(kept, np.sort(x, axis=0)[f : n - f])


@pytest.mark.parametrize(
    ("n", "f", "most"), [(20, 4, 67), (50, 10, 287), (100, 20, 803), (300, 15, 2464), (1000, 50, 13605)]
)
def test_the_network_is_as_short_as_promised(n, f, most):
    assert len(network(n, f).comparators) <= most


def test_without_trimming_there_is_nothing_to_compare():
    assert network(5, 0).comparators == ()
    assert network(5, 0).kept == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(("n", "f"), [(2, 1), (4, 2), (0, 0), (3, -1)])
def test_a_network_that_would_keep_nothing_is_refused(n, f):
    with pytest.raises(ValueError, match="expected 0 <= f and 2f < n"):
        network(n, f)


# The compiled code


def kernels(n, f):
    return [table_kernel(n, f), straight_line_kernel(n, f)]


@needs_compiler
@pytest.mark.parametrize("columns", [1, 7, 8, 63, 64, 65, 4096, 4097, 9000])
def test_any_number_of_columns_gives_the_sums_of_a_sort(columns):
    x = torch.from_numpy(np.random.default_rng(columns).integers(-999, 999, (9, columns)).astype(np.float32))
    for kernel in kernels(9, 2):
        np.testing.assert_array_equal(kernel(x, mean=False).numpy(), sorted_sum(x.numpy(), 2))
        assert torch.equal(kernel(x, mean=True), (kernel(x, mean=False) / 5).float())


@needs_compiler
def test_rows_that_lie_apart_backwards_or_on_top_of_each_other_are_read_where_they_are():
    x = torch.randint(-99, 99, (40, 301)).float()
    for view in (x[::4][:9], x[5:14, 3:290:1], x[:, ::3][:9], x.T[:9], x[:1].expand(9, 301), x[:9, 7:8]):
        for kernel in kernels(9, 2):
            wanted = sorted_sum(view.numpy(), 2)
            np.testing.assert_array_equal(kernel(view, mean=False).numpy(), wanted)


@needs_compiler
def test_several_threads_give_the_bits_of_one(monkeypatch):
    x = torch.randn(9, 70_001)
    before = [kernel(x, mean=mean) for kernel in kernels(9, 2) for mean in (True, False)]
    monkeypatch.setattr(compiled, "_WORK_OF_A_THREAD", 1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    after = [kernel(x, mean=mean) for kernel in kernels(9, 2) for mean in (True, False)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@needs_compiler
def test_kernels_work_above_2_to_the_24_elements():
    x = torch.arange(3, dtype=torch.float32)[:, None].expand(3, (1 << 24) // 3 + 1000).contiguous()
    for kernel in kernels(3, 1):
        assert bool((kernel(x, mean=True) == 1.0).all())


@needs_compiler
def test_a_kernel_refuses_another_number_of_rows():
    with pytest.raises(ValueError, match="this kernel is for 9"):
        table_kernel(9, 2)(torch.zeros(8, 5), mean=True)


@needs_compiler
def test_a_kernel_that_a_compiler_got_wrong_is_not_used(cache, monkeypatch):
    compiled.straight_line_kernel.cache_clear()
    monkeypatch.setattr(compiled, "straight_line_source", lambda _: straight_line_source(network(5, 1)))
    with pytest.raises(library.Unavailable, match="wrong sums"):
        straight_line_kernel(5, 2)


@needs_compiler
def test_the_generic_vector_code_of_other_processors_gives_the_same_sums(tmp_path):
    without = "".join(f"#undef {name}\n" for name in ("__AVX512F__", "__AVX__", "__SSE2__"))
    x = torch.from_numpy(np.random.default_rng(0).integers(-999, 999, (9, 333)).astype(np.float32))
    x[0, ::3], x[1, ::5] = float("nan"), float("inf")
    for source in (table_source(), straight_line_source(network(9, 2))):
        kernel = compiled.Kernel(library.load_library(without + source, optimisation="-O1"), network(9, 2))
        np.testing.assert_array_equal(kernel(x, mean=False).numpy(), sorted_sum(x.numpy(), 2))


# The cache


@needs_compiler
def test_a_library_is_compiled_once_and_kept_where_only_its_owner_can_write(cache, monkeypatch):
    assert library.load_library(TINY, optimisation="-O0").answer() == 42
    (kept,) = cache.iterdir()
    assert kept.stat().st_mode & 0o077 == 0
    assert cache.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("compiled again"))
    assert library.load_library(TINY, optimisation="-O0").answer() == 42


@needs_compiler
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "replaced", "writable", "linked"])
def test_a_damaged_library_is_compiled_again_instead_of_loaded(cache, damage, tmp_path):
    library.load_library(OTHER, optimisation="-O0")
    (other,) = cache.iterdir()
    foreign = other.read_bytes()
    other.unlink()
    source = TINY + f"// {damage}"
    library.load_library(source, optimisation="-O0")
    (kept,) = cache.iterdir()
    content = bytearray(kept.read_bytes())
    kept.unlink()  # the loaded one must not change under this process
    if damage == "truncated":
        kept.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
        kept.write_bytes(content)
    elif damage == "empty":
        kept.touch()
    elif damage == "replaced":
        kept.write_bytes(foreign[:-1] + b"?")
    else:
        target = tmp_path / "elsewhere.so" if damage == "linked" else kept
        target.write_bytes(foreign)
        target.chmod(0o777)
        if damage == "linked":
            kept.symlink_to(target)
    assert library.load_library(source, optimisation="-O0").answer() == 42
    assert library._intact(kept)


@needs_compiler
def test_a_folder_that_others_can_write_to_is_never_loaded_from(cache, tmp_path):
    library.load_library(TINY, optimisation="-O0")
    (tmp_path / "cache").chmod(0o777)
    folder = library.cache_folder()
    assert folder != cache
    assert tmp_path not in folder.parents
    assert library.load_library(TINY, optimisation="-O0").answer() == 42
    assert any(folder.iterdir())
    (tmp_path / "cache").chmod(0o700)
    assert library.cache_folder() == cache


@needs_compiler
def test_processes_that_compile_at_once_all_get_a_whole_library(cache):
    program = (  # the module by itself, since importing torch takes longer than compiling
        "import importlib.util as u; s = u.spec_from_file_location('library', 'common/aggregation/kernels/library.py');"
        "m = u.module_from_spec(s); s.loader.exec_module(m);"
        f"print(m.load_library({TINY!r}, optimisation='-O0').answer())"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    assert [child.communicate(timeout=100)[0].strip() for child in children] == ["42"] * 4
    (kept,) = cache.iterdir()
    assert library._intact(kept)


@needs_compiler
def test_what_a_killed_compilation_left_is_removed_when_it_is_old(cache):
    library.cache_folder()
    old, new = cache / ".making-old", cache / ".making-new"
    for left in (old, new):
        left.mkdir()
    os.utime(old, (0, 0))
    library.load_library(TINY, optimisation="-O0")
    assert not old.exists()
    assert new.exists()


@needs_compiler
def test_what_does_not_compile_is_unavailable_with_the_compilers_words(cache):
    with pytest.raises(library.Unavailable, match="nonsense"):
        library.load_library("nonsense", optimisation="-O0")
    assert not list(cache.iterdir())


# Which kernel runs


def test_without_a_compiler_rows_are_sorted_and_the_log_says_so_once(no_compiler, caplog):
    choose = Dispatcher()
    x = torch.randn(20, 500)
    choose.prepare(20, 4, 500, "cpu")
    for f in (4, 3):
        np.testing.assert_array_equal(choose(x, f, mean=False).numpy(), sorted_sum(x.numpy(), f))
        assert torch.equal(choose(x, f, mean=True), (torch.from_numpy(sorted_sum(x.numpy(), f)) / (20 - 2 * f)).float())
    assert [record.message for record in caplog.records] == [
        "the trimmed mean will be slower than it could be: no C++ compiler: c++, g++ and clang++ not found on the path"
    ]


def test_a_path_can_be_forced_and_one_that_cannot_be_had_is_an_error(no_compiler, monkeypatch):
    x = torch.randn(5, 3)
    monkeypatch.setenv(VARIABLE, "plain")
    assert Dispatcher()(x, 1, mean=True).shape == (3,)
    for path in ("table", "straight_line"):
        monkeypatch.setenv(VARIABLE, path)
        with pytest.raises(RuleError, match=f"{VARIABLE} = {path}: no C\\+\\+ compiler"):
            Dispatcher()(x, 1, mean=True)
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(RuleError, match="expected auto, plain, table, straight_line"):
        Dispatcher()(x, 1, mean=True)


@needs_compiler
def test_a_first_call_compiles_the_table_and_nothing_more():
    choose = Dispatcher()
    choose(torch.randn(11, 50), 2, mean=True)
    assert choose._best == {("cpu", 11, 2): table_kernel(11, 2)}
    assert not choose._underway


@needs_compiler
def test_the_prepared_n_runs_as_straight_line_code_when_it_is_large_enough_to_be_worth_it():
    choose = Dispatcher()
    choose.prepare(9, 2, 100, "cpu")
    assert choose._best[("cpu", 9, 2)] is table_kernel(9, 2)
    choose.prepare(9, 2, 1_000_000, "cpu")
    assert choose._best[("cpu", 9, 2)] is straight_line_kernel(9, 2)


@needs_compiler
def test_after_preparing_another_n_waits_for_no_compiler_and_is_faster_later(monkeypatch):
    release = threading.Event()
    made = []

    def slow(n, f):
        assert threading.current_thread() is not threading.main_thread()
        assert release.wait(60)
        made.append((n, f))
        return table_kernel(n, f)

    choose = Dispatcher()
    choose.prepare(100, 2, 10, "cpu")
    monkeypatch.setattr(dispatch, "table_kernel", slow)
    x = torch.randint(-9, 9, (90, 10)).float()
    for _ in range(3):
        np.testing.assert_array_equal(choose(x, 2, mean=False).numpy(), sorted_sum(x.numpy(), 2))
    assert not made
    release.set()
    for thread in threading.enumerate():
        if thread.name == "byzuldp-kernels":
            thread.join(60)
    assert made == [(90, 2)]
    assert choose._best[("cpu", 90, 2)] is table_kernel(90, 2)
    np.testing.assert_array_equal(choose(x, 2, mean=False).numpy(), sorted_sum(x.numpy(), 2))


def test_more_rows_than_a_network_is_built_for_are_sorted(monkeypatch):
    monkeypatch.setattr(dispatch, "table_kernel", lambda *_: pytest.fail("a network was built"))
    x = torch.randn(compiled.LARGEST_N + 1, 3)
    np.testing.assert_array_equal(Dispatcher()(x, 100, mean=False).numpy(), sorted_sum(x.numpy(), 100))


def test_the_rule_is_prepared_for_its_f(monkeypatch):
    asked = []
    monkeypatch.setattr(Dispatcher, "prepare", lambda _, *arguments: asked.append(arguments))
    make_rule("trimmed_mean", num_byzantine=3).prepare(9, 50, "cpu")
    assert asked == [(9, 3, 50, "cpu")]


# The plain path, and Triton


def test_the_sort_on_a_device_gives_the_bits_of_the_sort_on_the_cpu():
    x = np.random.default_rng(0).integers(-9, 10, (30, 5000)).astype(np.float32) * 2.0**-20
    x[3, ::5], x[4, ::7], x[5, ::11] = np.nan, np.inf, -np.inf
    np.testing.assert_array_equal(sorted_sum(x, 4), sorted_sum_on_device(torch.from_numpy(x), 4).numpy())


INTERPRETED = """
import numpy as np, torch
from common.aggregation.kernels.gpu import TritonKernel
from common.aggregation.kernels.network import network
from common.aggregation.kernels.plain import sorted_sum

for n, f, d in [(1, 0, 5), (3, 1, 1), (7, 0, 20), (9, 4, 300), (20, 4, 1100), (50, 10, 130)]:
    x = np.random.default_rng(n).integers(-(2**20), 2**20, (n, d)).astype(np.float32) * 2.0**-20
    x[0, ::5], x[n // 2, ::7], x[-1, ::11], x[:, 1::3] = np.nan, np.inf, 1e30, -0.0
    kernel = TritonKernel(network(n, f))
    with np.errstate(invalid="ignore"):
        wanted, rows = sorted_sum(x, f), torch.from_numpy(x)
        sums, means = kernel(rows, mean=False).numpy(), kernel(rows, mean=True).numpy()
        spread = np.repeat(x, 2, axis=1)  # columns apart: copied; rows apart: read where they are
        assert np.array_equal(kernel(torch.from_numpy(spread)[:, ::2], mean=False), wanted, equal_nan=True)
        assert np.array_equal(kernel(torch.from_numpy(spread)[:, :d], mean=False), sorted_sum(spread[:, :d], f),
                              equal_nan=True)
    assert np.array_equal(sums.view(np.int64)[np.isfinite(wanted)], wanted.view(np.int64)[np.isfinite(wanted)])
    assert np.array_equal(sums, wanted, equal_nan=True)
    assert np.array_equal(means, (wanted / (n - 2 * f)).astype(np.float32), equal_nan=True)
print("agreed")
"""


@pytest.mark.system  # for the time it takes
@needs_triton
def test_the_triton_kernel_gives_the_sums_of_a_sort_under_tritons_interpreter():
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.strip() == "agreed", done.stderr


def test_every_kernel_of_a_size_is_another_text():
    texts = [straight_line_source(network(n, f)) for n, f in itertools.product((9, 10), (1, 2))]
    assert len(set(texts)) == 4


WITHOUT_THE_REST = """
import runpy, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"pydantic", "randomgen", "safetensors", "torchvision", "grpc", "google", "typer"}:
            raise ImportError(f"{name} is not on a machine with a GPU")

sys.meta_path.insert(0, Blocker())
runpy.run_path("benchmarks/gpu_check.py", run_name="__main__")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: run benchmarks/gpu_check.sh")
def test_the_gpu_check_needs_only_torch_numpy_and_scipy_and_says_that_it_is_skipped_without_a_gpu():
    command = [sys.executable, "-c", WITHOUT_THE_REST]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 77, done.stderr
    assert done.stdout.startswith("skipped: torch sees no CUDA device here")
