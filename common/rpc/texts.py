"""A peer's words, as they may be shown."""

from __future__ import annotations

__all__ = ["shown"]

MOST = 200


def shown(text: str, most: int = MOST) -> str:
    """A peer's text, safe to print: short, on one line, without control characters."""
    clean = "".join(c if c.isprintable() else "�" for c in text[:most])
    return clean + ("…" if len(text) > most else "")
