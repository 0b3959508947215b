"""Rows of an environment's dataset: verifiers' input dict to our Row and back, nothing lost."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import msgspec

from rollstream.shared.environments.exact import survives
from rollstream.shared.environments.messages import to_openai
from rollstream.shared.records import Row

if TYPE_CHECKING:
    from datasets import Dataset

Split = Literal["train", "eval"]

_OWN_FIELDS = frozenset({"prompt", "answer", "info", "task", "example_id"})
_canonical = msgspec.json.Encoder(order="sorted")


class Rows(Sequence[Row]):
    """A dataset split, each row converted when it is asked for.

    `fell_back` is True where eval rows were asked for and the environment has only train rows.
    """

    def __init__(self, dataset: Dataset, *, fell_back: bool = False) -> None:
        self._dataset = dataset
        self.fell_back = fell_back

    def __len__(self) -> int:
        return len(self._dataset)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return to_row(self._dataset[index])


def to_row(record: dict[str, Any]) -> Row:
    """One dataset record.

    What a Row's typed field can't hold exactly (an answer that is no text, an info that is no
    dict, a task that is a dict) stays in `columns` under its own name and wins in `to_input`.
    Raises ValueError, naming the column, for a value that JSON can't carry.
    """
    record = {key: _finite(value) for key, value in record.items()}
    columns = {key: value for key, value in record.items() if key not in _OWN_FIELDS}

    answer = record.get("answer")
    if "answer" in record and not isinstance(answer, str):
        columns["answer"] = answer
        answer = None if answer is None else str(answer)
    info = record.get("info")
    if isinstance(info, str):
        info = json.loads(info)
    if info is not None and not isinstance(info, dict):
        columns["info"] = info
        info = {}
    task = record.get("task")
    if task is not None and not isinstance(task, str):
        columns["task"] = task
        task = None

    row = Row(
        prompt=to_openai(record["prompt"]),
        answer=answer,
        info=info or {},
        task=task or "",
        example_id=record.get("example_id", 0),
        columns=columns,
    )
    for name, value in {**columns, "info": row.info, "prompt": row.prompt}.items():
        if not survives(value):
            raise ValueError(
                f"column {name!r} holds a value that JSON can't carry "
                f"({type(value).__name__}): turn it into text or numbers, or remove the column"
            )
    return row


def to_input(row: Row) -> dict[str, Any]:
    """The row as verifiers' `RolloutInput`, a fresh copy.

    A missing answer stays missing (functions then get ""). A task that is plain text is left out:
    verifiers 0.3 refuses it and reads only JSON objects there.
    """
    fields: dict[str, Any] = {
        "prompt": row.prompt,
        "example_id": row.example_id,
        "info": row.info,
    }
    if row.answer is not None:
        fields["answer"] = row.answer
    if row.task.lstrip().startswith("{"):
        fields["task"] = row.task
    return copy.deepcopy(fields | row.columns)


def fingerprint(rows: Iterable[Row]) -> str:
    """sha256 over the rows' canonical JSON, in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(_canonical.encode(row) + b"\n")
    return digest.hexdigest()


def canonical_json(value: object) -> bytes:
    """JSON with sorted keys: equal values give equal bytes."""
    return _canonical.encode(value)


def _finite(value: Any) -> Any:
    """NaN and infinity (pandas' way to say 'missing') as None, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return value
