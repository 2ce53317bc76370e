"""Pages in a real, headless Chromium (Debian's), and what is wrong with them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from playwright.sync_api import ConsoleMessage, Page, Request, sync_playwright

__all__ = ["OpenPage", "Shown", "chromium", "missing"]

_QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

# Pairs of labels whose boxes share more than a pixel each way, and labels that stick out of their drawing.
_COLLISIONS = """
() => [...document.querySelectorAll("svg")].flatMap((svg) => {
  const around = svg.getBoundingClientRect();
  if (!around.width) return [];
  const labels = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()])
    .filter(([said, box]) => said.trim() && box.width);
  const out = labels.filter(([, b]) => b.left < around.left - 1 || b.right > around.right + 1 || b.top < around.top - 1
    || b.bottom > around.bottom + 1).map(([said]) => `${said} is cut off`);
  labels.forEach(([first, a], k) => labels.slice(k + 1).forEach(([second, b]) => {
    if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1) out.push(`${first} / ${second}`);
  }));
  return out.map((what) => `${svg.getAttribute("aria-label")}: ${what}`);
})
"""

# The least contrast (WCAG 2) of a text with what is behind it, over all that says something.
_CONTRAST = """
() => {
  const parse = (colour) => (colour.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92
    : ((v + 0.055) / 1.055) ** 2.4).reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0.5) return colour;
    }
    return [255, 255, 255];
  };
  let least = [99, ""];
  for (const element of document.querySelectorAll("svg text, p, td, th, b, li, h1, h2, h3, summary, figcaption")) {
    if (!element.textContent.trim() || !element.getBoundingClientRect().width) continue;
    const style = getComputedStyle(element), own = element.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const [a, b] = [light(parse(own)), light(behind(element))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < least[0]) least = [contrast, element.textContent.trim().slice(0, 60)];
  }
  return least;
}
"""


@dataclass
class Shown:
    """A page that is open.

    Attributes
    ----------
    errors
        What its console said was wrong.
    outside
        Requests that went anywhere but to where the page came from.
    """

    page: Page
    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    def collisions(self) -> list[str]:
        """Labels of drawings that lie over each other, or stick out."""
        return self.page.evaluate(_COLLISIONS)

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        return self.page.evaluate("() => document.documentElement.scrollWidth - innerWidth")

    def contrast(self) -> tuple[float, str]:
        """The least contrast of a text with its background, and that text."""
        least, text = self.page.evaluate(_CONTRAST)
        return least, text


OpenPage = Callable[..., AbstractContextManager[Shown]]


def missing() -> str | None:
    """Why there is no browser, for :func:`system_needs.needed`."""
    return None if shutil.which("chromium") else "chromium is missing: install the package of that name"


@contextmanager
def chromium() -> Iterator[OpenPage]:
    """A browser with a profile of its own; gives ``open_page(url, width=1280, dark=False)``."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(_QUIET))

        @contextmanager
        def open_page(url: str, width: int = 1280, *, dark: bool = False) -> Iterator[Shown]:
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
            shown = Shown(page)

            def said(message: ConsoleMessage) -> None:
                if message.type in ("error", "warning"):
                    shown.errors.append(message.text)

            def asked(request: Request) -> None:
                if not _same_place(request.url, url):
                    shown.outside.append(request.url)

            page.on("console", said)
            page.on("pageerror", lambda error: shown.errors.append(str(error)))
            page.on("request", asked)
            try:
                page.goto(url)
                yield shown
            finally:
                page.close()

        try:
            yield open_page
        finally:
            browser.close()


def _same_place(asked: str, page: str) -> bool:
    if urlsplit(page).scheme == "file":
        return asked.partition("#")[0] == page
    return urlsplit(asked)[:2] == urlsplit(page)[:2] or urlsplit(asked).scheme == "data"
