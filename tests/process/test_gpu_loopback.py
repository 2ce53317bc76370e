"""The parameter server over loopback that ``benchmarks/gpu_check.sh`` runs, with the CPU in the GPU's place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.config import Network
from ps.records import RoundMetrics
from ps.timing import SEGMENTS

ROOT = Path(__file__).parents[2]

ONLY = """
import sys
from importlib.machinery import PathFinder

THERE = {"torch", "torchgen", "functorch", "triton", "numpy", "scipy", "grpc", "google"}
WITH_TORCH = {"typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec"}

class Only:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target)
        top = name.partition(".")[0]
        if spec is None or top in THERE | WITH_TORCH or top.startswith(("nvidia", "cuda")):
            return spec
        places = [spec.origin or "", *(spec.submodule_search_locations or ())]
        return None if any("-packages" in str(place) for place in places) else spec

sys.meta_path[:] = [Only if finder is PathFinder else finder for finder in sys.meta_path]
"""
"""A machine that has torch, numpy, scipy, grpcio and protobuf, and what these need: other packages are not found."""


@pytest.fixture
def loopback(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    import gpu_loopback

    yield gpu_loopback
    for name in set(sys.modules) - before:
        if name.startswith(("gpu_", "scale_")):
            del sys.modules[name]


def gpu_check(tmp_path, *arguments):
    (tmp_path / "sitecustomize.py").write_text(ONLY)
    return subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu_check.sh"), *arguments],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.system  # for the time it takes
def test_a_server_over_loopback_needs_nothing_beyond_torch_numpy_scipy_grpcio_and_protobuf(tmp_path):
    done = gpu_check(tmp_path, "--device", "cpu", "--clients", "4", "--dimension", "2000", "--rounds", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert {"xxhash", "randomgen"} == {line.partition(" is missing: ")[0] for line in lines if " is missing: " in line}
    assert "θ: difference 0.0e+00 of the scale, the same bits" in lines
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.split()[:1] and line.split()[0] in SEGMENTS}
    assert list(rows) == list(SEGMENTS)
    assert all(float(time_ms) >= 0.0 for times in rows.values() for time_ms in times)
    assert lines[-1] == "all passed"


@pytest.mark.system
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_server_over_loopback_is_said_to_be_skipped(tmp_path):
    done = gpu_check(tmp_path)
    assert done.returncode == 77, done.stderr
    assert "skipped too: the parameter server over loopback" in done.stdout


def test_its_network_is_the_products_by_default(loopback):
    defaults = Network().model_dump()
    assert {name: defaults[name] for name in loopback.NETWORK} == loopback.NETWORK
    model_bytes, clients = 4_000_000, 20
    deadline = loopback.Setting().experiment().network.deadline_of_round(model_bytes, clients)
    assert deadline == Network().deadline_of_round(model_bytes, clients)


def made(loopback, theta, **segments):
    metrics = RoundMetrics(
        round_id=0,
        started_at=0.0,
        latency_s=1.0,
        segments=segments,
        spans=(),
        answered=1,
        missing=(),
        bytes_down=0,
        bytes_up=0,
    )
    return loopback.Made(torch.tensor(theta, dtype=torch.float32), [metrics])


@pytest.mark.parametrize(
    ("theta", "on_cpu", "on_cuda"),
    [
        ([1.0, -2.0], True, True),
        ([1.0, -2.000001], False, True),
        ([1.0, -2.00001], False, False),
        ([1.0, float("nan")], False, False),
    ],
)
def test_a_model_that_differs_is_told(loopback, theta, on_cpu, on_cuda):
    here, there = made(loopback, [1.0, -2.0]), made(loopback, theta)
    for device, same in (("cpu", on_cpu), ("cuda", on_cuda)):
        assert (loopback._compared(here, there, device) == []) == same


@pytest.mark.parametrize("theta", [[0.0, 0.0], [float("inf"), 1.0]])
def test_a_model_that_did_not_move_or_is_no_number_is_told(loopback, theta):
    assert loopback._compared(made(loopback, theta), made(loopback, theta), "cpu") != []


@pytest.mark.parametrize(
    ("rows_s", "noise_s", "told"), [(1e-4, 1e-4, []), (3e-3, 1e-4, ["rows"]), (1e-4, 3e-3, ["noise"])]
)
def test_rows_and_noise_that_travel_only_after_the_round_closed_are_told(loopback, monkeypatch, rows_s, noise_s, told):
    monkeypatch.setattr(loopback, "_copy_s", lambda *_: 4e-3)
    failures = loopback._waited(made(loopback, [1.0], transfer=rows_s, noise=noise_s), "cuda", loopback.Setting())
    assert [failure.split()[2] for failure in failures] == told
