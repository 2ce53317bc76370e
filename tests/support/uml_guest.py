"""What runs as the first process of User-Mode Linux: the netem backend, measured on a kernel that has ``sch_netem``.

Run by :mod:`test_netem_uml`; its root is the machine's, read-only. Prints one line that begins with ``RESULT`` and
powers off, whatever happens.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import traceback
from pathlib import Path

MODULES = ("veth", "bridge", "sch_netem", "sch_tbf")
POWER_OFF = 0x4321_FEDC


def main() -> None:
    results: dict[str, object] = {}
    begun = time.monotonic()
    try:
        for kind, target in (("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/run")):
            mount(kind, target)
        os.environ["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
        for module in MODULES:
            load(module, Path("/usr/lib/uml/modules") / os.uname().release, set())
        sys.path.insert(0, str(Path(__file__).parent))
        measure(results)
    except BaseException:
        results["error"] = traceback.format_exc()
    results["seconds"] = time.monotonic() - begun
    sys.stdout.write(f"\nRESULT {json.dumps(results)}\n")
    sys.stdout.flush()
    ctypes.CDLL(None).reboot(POWER_OFF)


def measure(results: dict[str, object]) -> None:
    import network_lab
    from network_lab import (
        DELAY,
        calm_round_trip_ms,
        comes_about,
        connection_attempt,
        half_open,
        handshake_ms,
        listener,
        rate_of_a_burst_bytes_s,
        send_datagrams,
    )

    from deploy.chaos.backend import CLEAR, Conditions
    from deploy.chaos.netem import NetemBackend

    network_lab.QUIET_S = 0.4
    lab = NetemBackend()
    results["problem"], results["capabilities"] = lab.probe(), sorted(lab.capabilities)
    lab.open(["client-0", "client-1"])
    results["facts"] = dict(lab.facts())

    def sent(up: Conditions, count: int, gap_s: float = 0.0) -> dict[str, object]:
        lab.shape("client-0", up, CLEAR)
        arrivals = send_datagrams(lab, "client-0", count, gap_s=gap_s)
        return {
            "arrived": len(arrivals.numbers),
            "numbers": len(arrivals.copies),
            "doubled": sum(copies == 2 for copies in arrivals.copies.values()),
            "overtaken": arrivals.overtaken,
            "delays_ms": sorted(arrivals.delays_ms),
        }

    lab.shape("client-0", DELAY, DELAY)
    results["delay"] = {
        "datagrams_ms": calm_round_trip_ms(lab, "client-0", 53.0),
        "tcp_ms": handshake_ms(lab, "client-0", tries=3),
        "of_another_link_ms": calm_round_trip_ms(lab, "client-1", 25.0),
    }
    results["jitter"] = sent(Conditions(delay_s=0.02, jitter_s=0.01), 300, 0.003)
    results["reordering"] = sent(Conditions(delay_s=0.05, reordering=0.25), 1000, 0.0005)
    results["loss"] = sent(Conditions(loss=0.1), 2000)
    results["duplication"] = sent(Conditions(duplication=0.1), 2000)
    results["clear"] = sent(CLEAR, 500)
    lab.shape("client-0", Conditions(rate_bytes_s=100_000.0, delay_s=0.01), CLEAR)
    results["rate"] = rate_of_a_burst_bytes_s(lab, "client-0", count=16)
    lab.shape("client-0", CLEAR, CLEAR)
    results["no_rate"] = rate_of_a_burst_bytes_s(lab, "client-0", count=16)
    lab.shape("client-0", CLEAR, Conditions(cut=True))
    with listener(lab), connection_attempt(lab, "client-0") as attempt:
        made = comes_about(attempt, within_s=0.5)
        answered = half_open(lab)
        lab.shape("client-0", CLEAR, CLEAR)
        results["cut"] = {"made": made, "half_open": answered, "healed": comes_about(attempt, within_s=15.0)}
    lab.close()


def mount(kind: str, target: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(kind.encode(), target.encode(), kind.encode(), 0, None):
        raise OSError(ctypes.get_errno(), f"mounting {target}")


def load(name: str, folder: Path, loaded: set[str]) -> None:
    """Load a kernel module after those that it needs."""
    for line in (folder / "modules.dep").read_text().splitlines():
        path, _, needs = line.partition(":")
        if Path(path).name == f"{name}.ko" and name not in loaded:
            loaded.add(name)
            for other in needs.split():
                load(Path(other).stem, folder, loaded)
            image = (folder / path).read_bytes()
            libc = ctypes.CDLL(None, use_errno=True)
            init_module = 175  # x86_64
            if libc.syscall(init_module, image, len(image), b"") and ctypes.get_errno() != 17:  # loaded already
                raise OSError(ctypes.get_errno(), f"loading {path}")


if __name__ == "__main__":
    main()
