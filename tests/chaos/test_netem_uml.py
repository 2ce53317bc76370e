"""The netem backend on a kernel that has ``sch_netem``: User-Mode Linux (Debian's), with this machine's root as its
read-only file system. It is booted once; the measurements come from :mod:`uml_guest`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import uml_guest
from scipy.stats import binom
from system_needs import needed

from deploy.chaos.backend import CAPABILITIES, CLEAR, Conditions
from deploy.chaos.netem import NetemBackend, netem

UNLIKELY = 1e-6
DEADLINE_S = 100.0  # on a busy machine; a quiet one takes 20 s


def within_chance(count: int, of: int, probability: float) -> bool:
    low, high = binom.ppf(UNLIKELY / 2, of, probability), binom.isf(UNLIKELY / 2, of, probability)
    return bool(low <= count <= high)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was measured inside."""
    kernel = shutil.which("linux.uml")
    if kernel is None:
        needed("needs the command linux.uml (Debian: user-mode-linux)")
    for tool in ("ip", "tc", "ss"):
        if shutil.which(tool) is None:
            needed(f"needs the command {tool} (Debian: iproute2)")
    folder = tmp_path_factory.mktemp("uml")
    command = [
        *(str(kernel), "mem=256M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", "quiet"),
        *("con=null", "con0=null,fd:1", f"uml_dir={folder}/", "umid=netem"),
        *(f"init={sys.executable}", "--", "-B", str(Path(uml_guest.__file__).resolve())),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            said = process.communicate(timeout=DEADLINE_S)[0].decode(errors="replace")
        finally:
            with contextlib.suppress(ProcessLookupError):  # all its processes, if it did not come to its end
                os.killpg(process.pid, signal.SIGKILL)
    lines = [line for line in said.splitlines() if line.startswith("RESULT ")]
    assert lines, f"no result; it said: {said[-3000:]}"
    results: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    assert "error" not in results, results["error"]
    return results


@pytest.mark.system
def test_it_finds_out_what_the_kernel_can_do(measured: dict[str, Any]) -> None:
    assert measured["problem"] is None
    lacking = {"refuse", "reset"}  # this kernel is built without INET_DIAG_DESTROY and without nftables for IPv4
    assert set(measured["capabilities"]) == set(CAPABILITIES) - lacking
    assert measured["facts"]["not possible here"] == "refuse, reset"


@pytest.mark.system
def test_two_delays_of_25_ms_make_a_round_trip_of_50_ms(measured: dict[str, Any]) -> None:
    delay = measured["delay"]
    assert 50.0 <= delay["datagrams_ms"] <= 53.0
    assert 50.0 <= delay["tcp_ms"] <= 58.0  # a process in there takes part in it
    assert delay["of_another_link_ms"] < 25.0


@pytest.mark.system
def test_jitter_spreads_the_delays_and_keeps_the_order(measured: dict[str, Any]) -> None:
    jitter = measured["jitter"]
    assert (jitter["numbers"], jitter["overtaken"]) == (300, 0)
    assert 10.0 <= jitter["delays_ms"][0] < 16.0
    assert jitter["delays_ms"][225] > 22.0


@pytest.mark.system
def test_packets_overtake_are_lost_and_doubled_as_often_as_asked_for(measured: dict[str, Any]) -> None:
    overtaking = measured["reordering"]
    assert overtaking["numbers"] == 1000
    assert overtaking["overtaken"] > 200
    assert within_chance(sum(delay < 25.0 for delay in overtaking["delays_ms"]), 1000, 0.25)
    assert within_chance(measured["loss"]["arrived"], 2000, 0.9)
    assert measured["duplication"]["numbers"] == 2000
    assert within_chance(measured["duplication"]["doubled"], 2000, 0.1)


@pytest.mark.system
def test_clearing_a_link_clears_everything(measured: dict[str, Any]) -> None:
    clear = measured["clear"]
    assert (clear["arrived"], clear["numbers"], clear["overtaken"]) == (500, 500, 0)
    assert clear["delays_ms"][250] < 10.0


@pytest.mark.system
def test_packets_leave_at_the_rate_of_their_link(measured: dict[str, Any]) -> None:
    assert 80_000 <= measured["rate"] <= 120_000
    assert measured["no_rate"] > 500_000


@pytest.mark.system
def test_of_a_cut_direction_only_the_other_one_passes(measured: dict[str, Any]) -> None:
    assert measured["cut"] == {"made": False, "half_open": 1, "healed": True}


def test_jitter_in_order_has_a_rate_that_nobody_notices() -> None:
    assert netem(Conditions(delay_s=0.02, jitter_s=0.01))[-2:] == ["rate", "10gbit"]
    assert netem(Conditions(delay_s=0.02, jitter_s=0.01, reordering=0.1))[-2:] == ["rate", "0bit"]


def test_a_cut_is_the_loss_of_everything() -> None:
    assert "loss 100.0000000%" in " ".join(netem(Conditions(cut=True, loss=0.1)))
    assert "loss 0.0000000%" in " ".join(netem(CLEAR))


def test_a_kernel_without_netem_is_told_apart() -> None:
    backend = NetemBackend()
    if (problem := backend.probe()) is None:
        pytest.skip("this kernel has netem")
    assert problem.startswith(("this kernel has no netem", "needs the command", "no network namespace"))
