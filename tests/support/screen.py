"""A terminal, as far as a live view needs one: lines that wrap, a cursor, erasing, and another width."""

from __future__ import annotations

import io
import re

__all__ = ["Screen"]

_PIECE = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|\x1b\]8;.*?(?:\x1b\\|\x07)|(.)", re.DOTALL)


class Screen(io.StringIO):
    """Takes what is written, and keeps what would be seen. It breaks long lines anew when its width changes.

    Attributes
    ----------
    writes
        How often something was written.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.writes = width, 0
        self._rows = [""]
        self._goes_on = [False]  # whether a row is the first part of a line that was too long for it
        self._row = self._column = 0

    def write(self, text: str) -> int:
        self.writes += 1
        for control, letter, plain in _PIECE.findall(text):
            if plain:
                self._put(plain)
            elif letter:
                self._control(control, letter)
        return len(text)

    def isatty(self) -> bool:
        return True

    def resize(self, width: int) -> None:
        """Lines are broken anew, and the cursor stays where it was in its line."""
        lines, at = [""], (0, 0)
        for number, (row, goes_on) in enumerate(zip(self._rows, self._goes_on, strict=True)):
            if number == self._row:
                at = len(lines) - 1, len(lines[-1]) + self._column
            lines[-1] += row
            if not goes_on:
                lines.append("")
        self.width, self._rows, self._goes_on = width, [], []
        for number, line in enumerate(lines[:-1]):
            parts = [line[start : start + width] for start in range(0, max(1, len(line)), width)]
            if number == at[0]:
                whole, rest = divmod(at[1], width)
                full = rest == 0 and whole == len(parts)  # behind the last place of a full row
                self._row, self._column = len(self._rows) + whole - full, width if full else rest
            self._rows += parts
            self._goes_on += [True] * (len(parts) - 1) + [False]

    @property
    def shown(self) -> list[str]:
        """What stands there, row by row, without blank ones at the end."""
        rows = [row.rstrip() for row in self._rows]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._next_row()
        else:
            if self._column == self.width:
                self._goes_on[self._row] = True
                self._next_row()
            row = self._rows[self._row].ljust(self._column)
            self._rows[self._row] = row[: self._column] + character + row[self._column + 1 :]
            self._column += 1

    def _next_row(self) -> None:
        self._row, self._column = self._row + 1, 0
        if self._row == len(self._rows):
            self._rows.append("")
            self._goes_on.append(False)

    def _control(self, control: str, letter: str) -> None:
        if letter == "A":
            self._row = max(0, self._row - int(control or 1))
        elif letter == "K":
            self._rows[self._row], self._goes_on[self._row] = "", False
        elif letter == "J":
            del self._rows[self._row + 1 :], self._goes_on[self._row + 1 :]
            self._rows[self._row], self._goes_on[self._row] = self._rows[self._row][: self._column], False
        elif letter not in "mhl":
            raise AssertionError(f"the screen does not know \\x1b[{control}{letter}")
