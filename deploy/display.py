"""Showing a run while it goes on: a live view on a terminal, plain lines anywhere else, nothing when asked.

Progress goes to standard error, so that standard output has results only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from deploy.panel import panel_of
from deploy.progress import Progress, seconds_words

__all__ = ["Display", "LineDisplay", "LiveDisplay", "QuietDisplay", "open_display"]

Clock = Callable[[], float]

REFRESH_S = 0.25
ROUND_LINE_S = 5.0
WAIT_LINE_S = 2.0
WARNING_LINES, WARNING_S = 20, 10.0
LONGEST_WARNING = 3000


class Display(Protocol):
    """Takes events as the parameter server reports them."""

    def show(self, event: dict[str, Any]) -> None:
        """Something happened."""

    def tick(self) -> None:
        """Time has passed."""


class QuietDisplay:
    """Shows nothing."""

    def show(self, event: dict[str, Any]) -> None:
        """Nothing."""

    def tick(self) -> None:
        """Nothing."""


class _Warnings:
    """Warnings, each once and not too many: a Byzantine client can cause as many as it likes."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._shown = self._held_back = 0
        self._recent: list[str] = []
        self._said_at = 0.0

    def add(self, message: str, now: float) -> None:
        if message in self._recent:
            return
        self._recent = [*self._recent[-9:], message]
        if self._shown < WARNING_LINES:
            self._shown += 1
            self._say(message[:LONGEST_WARNING])
            self._said_at = now
        else:
            self._held_back += 1
            self.tick(now)

    def tick(self, now: float) -> None:
        if self._held_back and now - self._said_at >= WARNING_S:
            self._say(f"{self._held_back} more warnings; see operator/logs in the run folder")
            self._held_back, self._said_at = 0, now


class LineDisplay:
    """One line per evaluation, every few seconds otherwise, and whenever the run begins to wait for something.

    Parameters
    ----------
    write
        Takes a line, without its end.
    clock
        Monotonic seconds.
    """

    def __init__(self, name: str, rounds: int, write: Callable[[str], None], clock: Clock = time.monotonic) -> None:
        self._progress, self._write, self._clock = Progress(name, rounds), write, clock
        self._warnings = _Warnings(lambda message: write(f"warning: {message}"))
        self._round_line_at = self._wait_line_at = -1e9
        self._round_line_of = -1
        self._wait_unsaid = False

    def show(self, event: dict[str, Any]) -> None:
        now = self._clock()
        self._progress.take(event, now)
        match event.get("event"):
            case "listening":
                self._write(f"run {event['run_id']} at {event['address']}, folder {event['run_dir']}")
                if event.get("wiretap"):
                    self._write(f"wiretap at {event['wiretap']}: honest momenta are readable, this run is not private")
            case "status_page":
                self._write(f"status page: {self._progress.status_url}")
            case "resumed":
                self._write(f"resuming from round {event['round']}")
            case "note":
                self._write(event["message"])
            case "wait":
                self._wait_unsaid = True
            case "evaluation":
                self._round_line(now)
            case "warning" | "client_error" | "suspended":
                self._warnings.add(event["message"], now)
            case "end":
                self._write(f"{event['status']}: {event['message']}")
        self.tick()

    def tick(self) -> None:
        now, progress = self._clock(), self._progress
        self._warnings.tick(now)
        if progress.wait is None:
            self._wait_unsaid = False
        if self._wait_unsaid and now - self._wait_line_at >= WAIT_LINE_S:
            self._write(f"waiting: {progress.waiting(now)}")
            self._wait_unsaid, self._wait_line_at = False, now
        if progress.round > self._round_line_of and now - self._round_line_at >= ROUND_LINE_S and progress.round:
            self._round_line(now)

    def _round_line(self, now: float) -> None:
        progress = self._progress
        self._round_line_at, self._round_line_of = now, progress.round
        parts = [f"round {progress.round}/{progress.of}", f"accuracy {progress.accuracy_words()}"]
        if progress.round:
            parts += [
                progress.privacy_words(),
                f"{seconds_words(progress.latency_s)} a round",
                f"answered {progress.answered_words()}",
            ]
        self._write("  ".join(parts))


class LiveDisplay:
    """A panel that is redrawn in place; warnings are printed above it and stay.

    Parameters
    ----------
    budget
        ε, if privacy was asked for.
    stays
        Whether the last state is left on the screen.
    """

    def __init__(
        self,
        name: str,
        rounds: int,
        console: Console,
        clock: Clock = time.monotonic,
        *,
        budget: float | None = None,
        stays: bool = False,
    ) -> None:
        self._progress, self._console, self._clock = Progress(name, rounds, budget), console, clock
        self._stays = stays
        self._warnings = _Warnings(
            lambda message: console.print(Text(f"warning: {message}", style="yellow"), soft_wrap=True)
        )
        self._drawn_at = -1e9
        self._width, self._lines = console.width, 0
        self._live = self._new_live()

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.transient = not self._stays
        self._live.stop()

    def show(self, event: dict[str, Any]) -> None:
        self._progress.take(event, self._clock())
        if event.get("event") in ("warning", "client_error", "suspended"):
            self._warnings.add(event["message"], self._clock())
        self.tick()

    def tick(self) -> None:
        now = self._clock()
        self._warnings.tick(now)
        if now - self._drawn_at >= REFRESH_S:
            self._drawn_at = now
            if self._console.width != self._width:
                self._begin_anew()
            self._live.refresh()

    def render(self) -> RenderableType:
        """The panel as of now."""
        width, height = self._console.size
        # One line is left free: with it the terminal would scroll, and the panel's top be out of reach.
        room = height - 1
        colour = self._console.color_system is not None and not self._console.no_color
        panel = panel_of(self._progress, self._clock(), width=width, height=room, colour=colour)
        self._width = width
        self._lines = panel.height or 0
        return panel

    def _new_live(self) -> Live:
        return Live(console=self._console, auto_refresh=False, transient=True, get_renderable=self.render)

    def _begin_anew(self) -> None:
        """The terminal has another width. In a narrower one the lines of the panel were broken: take all of it away."""
        broken = self._lines * (-(-self._width // max(1, self._console.width)) - 1)
        self._live.stop()
        if broken > 0:
            self._console.file.write(f"\x1b[{broken}A\x1b[J")
        self._live = self._new_live()
        self._live.start()


@contextlib.contextmanager
def open_display(
    name: str,
    rounds: int,
    *,
    budget: float | None = None,
    quiet: bool = False,
    style: Literal["auto", "lines"] = "auto",
    stays: bool = False,
) -> Iterator[Display]:
    """The display that suits standard error.

    Parameters
    ----------
    name, rounds
        The experiment's name and its T.
    budget
        ε, if privacy was asked for.
    quiet
        Show nothing.
    stays
        Whether a live view is left on the screen at the end.
    style
        ``lines`` even on a terminal: for a caller that cannot give ``tick`` regularly.
    """
    console = Console(stderr=True)
    if quiet:
        yield QuietDisplay()
    elif console.is_terminal and not console.is_dumb_terminal and style == "auto":
        with LiveDisplay(name, rounds, console, budget=budget, stays=stays) as live:
            yield live
    else:
        yield LineDisplay(name, rounds, lambda line: _write_line(console, line))


def _write_line(console: Console, line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        console.file.write(line + "\n")
        console.file.flush()
