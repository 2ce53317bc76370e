"""``table.csv``: one row per run, in the order of the grid; and the same as Parquet where pyarrow is installed.

The table is enough to go on from: a run whose key is in it with an outcome is not run again.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.durable import write_durably
from common.errors import StoreDamaged, StoreUnwritable
from deploy.sweep.points import Point, shown
from deploy.sweep.results import COLUMNS, Row

__all__ = ["TABLE", "read_table", "records_of", "write_csv", "write_parquet", "write_text"]

TABLE = "table.csv"
_FIRST, _LAST = ("key",), ("status", *COLUMNS, "exit_code", "error", "attempts", "seconds")


def records_of(points: Sequence[Point], rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    """The table: for each run that was tried, key, what the grid set, and what came out."""
    return [
        {
            "key": point.key,
            **point.values,
            "status": row.status,
            **{name: row.results.get(name) for name in COLUMNS},
            "exit_code": row.exit_code,
            "error": row.error,
            "attempts": row.attempts,
            "seconds": row.seconds,
        }
        for point in points
        if (row := rows.get(point.key)) is not None
    ]


def write_csv(path: Path, records: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Whole or not at all; text as it is, nothing as an empty cell, everything else as JSON."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(record.get(column)) for column in columns] for record in records)
    write_text(path, text.getvalue())


def write_text(path: Path, text: str) -> None:
    """Whole or not at all.

    Raises
    ------
    StoreUnwritable
        It cannot be written.
    """
    try:
        write_durably(path, text.encode())
    except OSError as problem:
        raise StoreUnwritable(
            f"{path}: cannot be written: {problem.strerror}; free space or choose another --out"
        ) from None


def write_parquet(path: Path, records: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> bool:
    """The same as Parquet; False where pyarrow is not installed. Columns of mixed kinds are text."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        return False
    arrays = {}
    for column in columns:
        values = [record.get(column) for record in records]
        kinds = {type(value) for value in values if value is not None}
        plain = kinds <= {int, float} or (len(kinds) == 1 and kinds <= {str, bool})
        arrays[column] = pa.array([None if v is None else v if plain else shown(v) for v in values])
    new = path.with_name(path.name + ".tmp")
    parquet.write_table(pa.table(arrays), new)
    new.replace(path)
    return True


def columns_of(keys: Iterable[str]) -> list[str]:
    """Of a table whose grid varies these."""
    return [*_FIRST, *keys, *_LAST]


def read_table(path: Path) -> dict[str, Row]:
    """The rows of a table, by key; empty where there is none.

    Raises
    ------
    StoreDamaged
        It is no such table.
    """
    if not path.is_file():
        return {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if missing := {*_FIRST, *_LAST} - set(reader.fieldnames or ()):
                raise ValueError(f"no column {', '.join(sorted(missing))}")
            rows = [_row(record) for record in reader]
    except (OSError, ValueError, csv.Error) as problem:
        raise StoreDamaged(
            f"{path}: not a table of a sweep ({problem}); move it away, and its runs are run again, or restore it"
        ) from None
    return {row.key: row for row in rows}


def _row(record: Mapping[str, str]) -> Row:
    return Row(
        key=record["key"],
        values={name: _value(text) for name, text in record.items() if name not in (*_FIRST, *_LAST)},
        status=record["status"],
        results={name: _value(record[name]) for name in COLUMNS},
        error=record["error"],
        exit_code=int(record["exit_code"] or 0),
        attempts=int(record["attempts"] or 1),
        seconds=float(record["seconds"] or 0.0),
    )


def _cell(value: Any) -> str:
    return "" if value is None else shown(value)


def _value(text: str) -> Any:
    if text == "":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text
