"""A dataset's final files, made from its parts: `dataset.jsonl` and `dataset.parquet`.

JSONL: one line per delivered group, Atropos' `ScoredDataGroup` with chat `messages`. Parquet: one
row per sample, or per sequence of a sample that has several.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollstream.services.sink.parts import PartFile, in_order
from rollstream.services.sink.trajectories import scored_data_group
from rollstream.shared.arrays import unpack
from rollstream.shared.durable import replacing
from rollstream.shared.records import Group, Message, Outcome, Sample
from rollstream.shared.runs import RunConfig

FORMATS = ("jsonl", "parquet")
ROWS_AT_ONCE = 1024


def write_dataset(parts: list[PartFile], out: Path, run: RunConfig) -> None:
    """Make the run's files in `out` anew; the same parts give the same files.

    Raises PartError where a part is damaged.
    """
    for format in run.sink.formats:
        with replacing(out / f"dataset.{format}") as path:
            groups = (
                line.group for line in in_order(parts, frozenset({Outcome.DELIVERED}))
                if line.group is not None
            )
            (_write_jsonl if format == "jsonl" else _write_parquet)(groups, path, run)


def env_index(run: RunConfig, group: Group) -> int | None:
    """Atropos' env_id: which of the run's environments the group is from."""
    return next((i for i, e in enumerate(run.environments) if e.id == group.env.id), None)


def completion_text(sample: Sample) -> str:
    """What the model said last, as text."""
    for message in reversed(sample.completion):
        if message.get("role") == "assistant":
            return _text(message) or ""
    return ""


def _write_jsonl(groups: Iterator[Group], path: Path, run: RunConfig) -> None:
    with path.open("wb") as file:
        for group in groups:
            line = scored_data_group(
                group, env_id=env_index(run, group), send_advantages=run.send_advantages,
                include_messages=True,
            )
            file.write(msgspec.json.encode(line) + b"\n")


def _write_parquet(groups: Iterator[Group], path: Path, run: RunConfig) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    message = pa.struct([
        ("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.string()),
    ])
    schema = pa.schema([
        ("run", pa.string()), ("n", pa.int64()), ("i", pa.int32()), ("sequence", pa.int32()),
        ("epoch", pa.int32()), ("row_index", pa.int64()), ("env", pa.string()),
        ("question", pa.string()), ("answer", pa.string()), ("messages", pa.list_(message)),
        ("completion", pa.string()), ("parsed_answer", pa.string()), ("reward", pa.float64()),
        ("advantage", pa.float64()), ("rewards", pa.map_(pa.string(), pa.float64())),
        ("metrics", pa.map_(pa.string(), pa.float64())), ("stop", pa.string()),
        ("finish_reason", pa.string()), ("model", pa.string()),
        ("prompt_tokens", pa.int64()), ("completion_tokens", pa.int64()),
        ("cost_usd", pa.float64()), ("tokens", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.uint8())), ("logprobs", pa.list_(pa.float32())),
    ])
    rows: list[dict[str, Any]] = []
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for group in groups:
            rows += _rows(group)
            if len(rows) >= ROWS_AT_ONCE:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows.clear()
        writer.write_table(pa.Table.from_pylist(rows, schema))


def _rows(group: Group) -> Iterator[dict[str, Any]]:
    for sample in group.samples:
        shared = {
            "run": group.run, "n": group.n, "i": sample.i, "epoch": group.epoch,
            "row_index": group.row_index, "env": group.env.id, "question": group.row.question,
            "answer": group.row.answer,
            "messages": [_message(m) for m in [*group.row.prompt, *sample.completion]],
            "completion": completion_text(sample), "parsed_answer": sample.parsed_answer,
            "reward": sample.reward, "advantage": sample.advantage,
            "rewards": [(part.source, part.value) for part in sample.rewards],
            "metrics": list(sample.metrics.items()), "stop": sample.stop.value,
            "finish_reason": sample.finish_reason, "model": group.model,
            "prompt_tokens": sample.usage.prompt_tokens,
            "completion_tokens": sample.usage.completion_tokens,
            "cost_usd": sample.usage.cost_usd,
        }
        for number, sequence in enumerate(sample.sequences or [None]):
            arrays: dict[str, Any] = {"tokens": None, "mask": None, "logprobs": None}
            if sequence is not None:
                arrays["tokens"] = unpack(sequence.tokens)
                arrays["mask"] = unpack(sequence.mask)
                arrays["logprobs"] = sequence.logprobs and unpack(sequence.logprobs)
            yield {**shared, "sequence": number, **arrays}


def _message(message: Message) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {
        "role": message.get("role"), "content": _text(message),
        "tool_calls": msgspec.json.encode(calls).decode() if calls else None,
    }


def _text(message: Message) -> str | None:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content
    return msgspec.json.encode(content).decode()
