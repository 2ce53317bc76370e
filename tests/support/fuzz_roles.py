"""Processes that tell more about themselves than the product does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.config import Experiment


def serve_and_tell_modules(say: Callable[[Mapping[str, Any]], None], experiment: Experiment, run_dir: Path) -> None:
    """A parameter server that says once it listens which modules it has loaded."""
    from ps.main import run_parameter_server

    def report(event: Mapping[str, Any]) -> None:
        say(event)
        if event["event"] == "listening":
            say({"event": "modules", "names": sorted(sys.modules)})

    run_parameter_server(experiment, run_dir, report=report)
