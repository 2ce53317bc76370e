"""A SLURM job array: one task for each run that has no outcome yet."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

__all__ = ["array_of", "slurm_script"]


def array_of(indices: Sequence[int]) -> str:
    """Sorted indices as ``--array`` takes them: ``0-3,7``."""
    parts: list[str] = []
    first = last = indices[0]
    for index in (*indices[1:], None):
        if index is not None and index == last + 1:
            last = index
            continue
        parts.append(f"{first}" if first == last else f"{first}-{last}")
        if index is not None:
            first = last = index
    return ",".join(parts)


def slurm_script(name: str, indices: Sequence[int], command: Sequence[str], out: Path, *, at_once: int | None) -> str:
    """The script to be given to ``sbatch``.

    Parameters
    ----------
    indices
        Of the runs, in the whole grid.
    command
        What runs one of them, without its index.
    out
        The sweep's folder, on a file system that all nodes share.
    at_once
        How many tasks may run at the same time; None leaves that to the cluster.
    """
    array = array_of(indices) + ("" if at_once is None else f"%{at_once}")
    most = max(indices)
    return f"""\
#!/bin/bash
# {len(indices)} runs of the sweep {name}. Give this to sbatch; memory, time, partition and account are yours to add.
# Then `{shlex.join([*command[:2], *command[2:], "--table"])}` makes the tables.
# The largest index is {most}: the cluster's MaxArraySize must be above it (scontrol show config | grep MaxArraySize).
#SBATCH --job-name={shlex.quote(f"byzuldp-{name}")}
#SBATCH --array={array}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
#SBATCH --output={shlex.quote(str(out / "slurm-%A_%a.out"))}
set -euo pipefail
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1
exec {shlex.join(command)} --only "$SLURM_ARRAY_TASK_ID"
"""
