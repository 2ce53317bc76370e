"""A helper program of a backend, which is told what to do in JSON lines and lives as long as somebody can tell it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from common.errors import RunFailed

__all__ = ["HelperProcess"]

ANSWER_S, LEAVE_S = 20.0, 5.0


class HelperProcess:
    """A Python program that answers each JSON line on its standard input by one on its standard output.

    It ends at the end of its standard input, which only this process holds: so it ends with this process, whatever
    ends that.

    Parameters
    ----------
    program
        A file that needs the standard library alone.
    title
        What to call it in an error.

    Raises
    ------
    RunFailed
        It cannot be started.
    """

    def __init__(self, program: Path, title: str) -> None:
        self._title = title
        # In a session of its own, so that Ctrl-C leaves it to us; -I, so that nothing here shadows a module.
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-I", str(program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as problem:
            raise RunFailed(f"{title} cannot be started: {problem}") from None

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Tell it something, and wait for its answer.

        Raises
        ------
        RunFailed
            It has died, does not answer, or could not do it.
        """
        requests, answers = self._process.stdin, self._process.stdout
        if requests is None or answers is None or requests.closed:
            raise RunFailed(f"{self._title} is closed")
        try:
            os.write(requests.fileno(), json.dumps({"op": op, **arguments}).encode() + b"\n")
            line = b""
            while not line.endswith(b"\n"):
                if not select.select([answers], [], [], ANSWER_S)[0]:
                    raise RunFailed(f"{self._title} did not answer {op!r} within {ANSWER_S:.0f} s")
                data = os.read(answers.fileno(), 1 << 16)
                if not data:
                    raise BrokenPipeError
                line += data
        except BrokenPipeError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_S)
            raise RunFailed(
                f"{self._title} ended with exit code {self._process.returncode} when asked to {op!r}"
            ) from None
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RunFailed(f"{self._title} could not {op!r}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End it; a second call does nothing."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(LEAVE_S)
