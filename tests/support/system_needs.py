"""What a test needs of the machine: without it the test is skipped, or fails where everything has to be there."""

from __future__ import annotations

import os

import pytest


def needed(problem: str | None) -> None:
    """Skip the test because of a problem; with ``BYZULDP_SYSTEM_REQUIRED=1`` in the environment, fail it."""
    if problem is None:
        return
    if os.environ.get("BYZULDP_SYSTEM_REQUIRED") == "1":
        pytest.fail(f"BYZULDP_SYSTEM_REQUIRED=1, but: {problem}")
    pytest.skip(problem)
