"""What the fork server imports once, so that its children need not.

Importing torch takes seconds and hundreds of megabytes; a child that is forked from a process which has done so starts
in milliseconds and shares those pages. That is sound only as long as the forking process has one thread and has not
used gRPC, CUDA or torch's thread pools: importing them is all that happens here. The launcher sets OMP_NUM_THREADS and
OPENBLAS_NUM_THREADS to 1 before, since OpenBLAS makes its threads on import. torchvision stays out: 1.5 s, and it is
used only where a data set is decoded.
"""

from __future__ import annotations

import gc
import os
import sys

import torch  # noqa: F401

import ps.main  # noqa: F401


def _threads() -> int:
    """How many threads this process has; 1 where the system does not say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


if _threads() > 1:
    sys.stderr.write(
        f"warning: importing torch, numpy and gRPC left {_threads()} threads, expected 1; forking from such a process "
        "can hang. Look for a plug-in or a BLAS that starts threads on import\n"
    )

# Nothing that exists now is garbage: without this, the children's collectors would touch, and so copy, every page.
gc.collect()
gc.freeze()
