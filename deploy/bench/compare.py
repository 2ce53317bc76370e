"""``byzuldp bench compare``: has it become slower?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["compare"]


def compare(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="The earlier measurement.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="The later one.", show_default=False)],
    fail_if_slower: Annotated[
        bool, typer.Option("--fail-if-slower", help="Exit with 23 if B is slower by more than the noise.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the comparison as JSON on stdout, nothing else.")
    ] = False,
) -> None:
    """Say whether two measurements of `byzuldp bench latency` differ by more than their noise.

    Blocks of successive rounds are compared by ranks, since rounds that follow one another are not independent. The
    exit code is 0 whatever the verdict is, unless --fail-if-slower is given.
    """
    import json

    from common.errors import RunFailed
    from deploy.bench.comparing import SLOWER, compared
    from deploy.bench.result import read

    comparison = compared(read(a), read(b))
    if as_json:
        typer.echo(json.dumps(comparison.as_json(), indent=2))
    else:
        from rich.console import Console

        from deploy.bench.tables import render_comparison

        Console().print(render_comparison(comparison), highlight=False)
    if fail_if_slower and comparison.slower:
        slower = [point for point in comparison.points if point.verdict == SLOWER]
        names = "; ".join(f"{point.name}: {point.difference.ratio:.2f} times" for point in slower)
        raise RunFailed(f"{b} is slower than {a} by more than the noise: {names}")
