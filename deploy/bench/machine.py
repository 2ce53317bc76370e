"""What a measurement depends on: processor, memory, system, versions."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["LIBRARIES", "available_bytes", "machine"]

LIBRARIES = ("byzuldp", "torch", "numpy", "grpcio", "protobuf")
VECTORS = ("sse2", "avx", "avx2", "avx512f", "asimd", "sve")


def machine() -> dict[str, str]:
    """Facts in few words each; needs nothing but the standard library."""
    processor, flags = _processor()
    vectors = ", ".join(name for name in VECTORS if name in flags) or "unknown vector instructions"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "processor": f"{processor}, {cores} cores for this process, {vectors}",
        "memory": f"{_meminfo('MemTotal') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in LIBRARIES},
    }


def available_bytes() -> int:
    """Memory that could be used now; 0 where the system does not say."""
    return _meminfo("MemAvailable")


def _processor() -> tuple[str, frozenset[str]]:
    name, flags = platform.processor() or platform.machine(), ""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "model name":
            name = value
        elif key in ("flags", "Features"):
            flags = value
    return name, frozenset(flags.split())


def _meminfo(key: str) -> int:
    info = Path("/proc/meminfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        name, _, value = line.partition(":")
        if name == key:
            return 1024 * int(value.split()[0])
    return 0


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
