"""A Ray cluster: every core of every node runs one simulation at a time.

Each node needs this package and the data; the folder of the sweep stays where the sweep was started. What travels to a
node and back is text. A node that dies costs the runs it had; they are begun again elsewhere, at most so often.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from deploy.processes import CHILD_ENVIRONMENT
from deploy.sweep.job import Job
from deploy.sweep.results import ERROR, Row

__all__ = ["OnRay"]

TRIES = 3


class OnRay:
    """Runs on a cluster.

    Parameters
    ----------
    address
        Of a running cluster, or ``auto``; ``local`` begins one on this machine.

    Raises
    ------
    ConfigError
        Ray is not installed, or there is no such cluster.
    """

    def __init__(self, address: str = "auto") -> None:
        try:
            import ray
        except ImportError:
            raise ConfigError("--ray needs Ray, which is not installed: pip install 'byzuldp[ray]'") from None
        self._ray: Any = ray
        if not ray.is_initialized():
            try:
                ray.init(address=None if address == "local" else address, log_to_driver=False, configure_logging=False)
            except ConnectionError as problem:
                raise ConfigError(
                    f"--ray {address}: no Ray cluster there ({problem}); start one with `ray start --head`, name its "
                    "address, or use --ray local"
                ) from None
        self.width = max(1, int(ray.cluster_resources().get("CPU", 1)))

    def rows(self, jobs: Sequence[Job], begun: Callable[[Job], None]) -> Generator[Row, None, None]:
        ray = self._ray
        remote = ray.remote(num_cpus=1, max_retries=0, runtime_env={"env_vars": dict(CHILD_ENVIRONMENT)})(_run_there)
        waiting, tries = list(reversed(jobs)), dict.fromkeys((job.key for job in jobs), 0)
        under_way: dict[Any, Job] = {}
        try:
            while waiting or under_way:
                # No more than there are cores: what waits in the cluster's queue has not begun.
                while waiting and len(under_way) < self.width:
                    job = waiting.pop()
                    tries[job.key] += 1
                    begun(job)
                    under_way[remote.remote(job.as_text(), os.getcwd())] = job
                ready, _ = ray.wait(list(under_way), num_returns=1)
                job = under_way.pop(ready[0])
                try:
                    yield Row(**json.loads(ray.get(ready[0])))
                except ray.exceptions.RayError as problem:
                    if tries[job.key] < TRIES:
                        waiting.append(job)
                    else:
                        text = f"its node or process died {TRIES} times: {' '.join(str(problem).split())[:500]}"
                        yield Row(job.key, job.values, ERROR, error=text, exit_code=1)
        finally:
            for task in under_way:
                ray.cancel(task, force=True)


def _run_there(job: str, working_directory: str) -> str:
    """On a node: the run in a temporary folder, the rest as where the sweep was started, if that exists there."""
    from deploy.sweep.job import run_as_text

    with suppress(OSError):
        os.chdir(working_directory)  # where ./data is
    with tempfile.TemporaryDirectory(prefix="byzuldp-sweep-") as folder:
        tree = json.loads(job) | {"run_dir": str(Path(folder) / "run")}
        return run_as_text(json.dumps(tree))
