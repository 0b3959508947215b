"""Where rows come from: a verifiers environment, or a file of chats or questions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollstream.shared.environments import v0
from rollstream.shared.environments.library import Library
from rollstream.shared.environments.rows import fingerprint
from rollstream.shared.records import EnvRef, Row
from rollstream.shared.runs import EnvironmentSource, Refusal

TEXT_COLUMNS = ("messages", "prompt", "question")


class Source:
    """One source's rows and who they are."""

    def __init__(self, ref: EnvRef, rows: Sequence[Row]) -> None:
        self.ref = ref
        self.rows = rows
        self.dataset_fingerprint = fingerprint(rows)


def open_source(source: EnvironmentSource, library: Library) -> Source:
    """An environment's split, or a file, which is read anew each time.

    Raises Refusal naming the field, its value and the fix.
    """
    if source.id:
        try:
            environment = library.get(source.id, source.args)
            return Source(environment.ref, environment.rows(source.split))
        except v0.EnvironmentUnusable as error:
            raise Refusal("env", source.id, error.reason) from error
    rows = [_row(record, source.dataset, n) for n, record in enumerate(_records(source.dataset))]
    if not rows:
        raise Refusal("dataset", source.dataset, "it is empty: give a file with rows")
    return Source(EnvRef(id="", fingerprint=""), rows)


def _records(path: str) -> list[dict[str, Any]]:
    file = Path(path)
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet as parquet

            return parquet.read_table(file).to_pylist()
        if file.suffix in (".jsonl", ".json"):
            return list(_lines(file))
    except ImportError as error:
        raise Refusal("dataset", path, "pip install rollstream[export] for parquet") from error
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal("dataset", path, f"give a readable file ({error})") from error
    raise Refusal("dataset", path, "use a .jsonl or .parquet file")


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """A JSONL file's records. Raises ValueError naming the line."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"line {number} is no JSON object")
            yield record


def _row(record: dict[str, Any], path: str, number: int) -> Row:
    column = next((c for c in TEXT_COLUMNS if record.get(c)), None)
    if column is None:
        raise Refusal(
            "dataset", path,
            f"row {number} has columns {', '.join(record)}: it needs one of "
            f"{', '.join(TEXT_COLUMNS)}",
        )
    value = record[column]
    messages = value if isinstance(value, list) else [{"role": "user", "content": str(value)}]
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise Refusal(
            "dataset", path, f"row {number}: {column} must be text, or a list of messages "
            '{"role": ..., "content": ...}'
        )
    answer = record.get("answer")
    info = record.get("info")
    return Row(
        prompt=messages, answer=None if answer is None else str(answer),
        info=info if isinstance(info, dict) else {}, example_id=number,
        columns={
            key: item for key, item in record.items()
            if key not in (*TEXT_COLUMNS, "answer", "info")
        },
    )
