"""A grown dataset is a new run; rows that an earlier one has delivered are left out, by content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rig import Engine, rig

from rollstream.services.cli.propose import Refused
from rollstream.services.prompt_producer.done_rows import row_hash
from rollstream.shared.records import Issued, Row

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

ANSWERS = [{"text": "Yes."}]


def dataset(folder: Path, name: str, questions: list[str]) -> str:
    path = folder / name
    path.write_text("".join(json.dumps({"question": q}) + "\n" for q in questions))
    return str(path)


async def test_rows_of_an_earlier_run_are_left_out(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        await made.services("sink", "scorer", "generator", "prompt-producer")
        common = {"env": "", "epochs": 1, "group_size": 1}
        first = await made.run(
            "sft", "first", dataset=dataset(tmp_path, "a.jsonl", ["one", "two"]), **common
        )
        await made.done(first)
        grown = dataset(tmp_path, "b.jsonl", ["zero", "two", "one", "three"])
        second = await made.run(
            "sft", "second", dataset=grown, exclude_done="first", **common
        )
        await made.done(second)
        asked = [line["messages"][0][0]["content"] for line in made.dataset(second)]
        assert sorted(asked) == ["three", "zero"]
        ledger = await made.records(second, "ledger")
        hashes = {record.row_hash for record in ledger if isinstance(record, Issued)}
        assert hashes == {
            row_hash(Row(prompt=[{"role": "user", "content": text}])) for text in asked
        }
        with pytest.raises(Refused, match="exclude_done = nobody: no such run"):
            await made.run("sft", "third", dataset=grown, exclude_done="nobody", **common)
        with pytest.raises(Refused, match="exclude_done = first: it has done all rows of"):
            await made.run("sft", "fourth", dataset=first.environments[0].dataset,
                           exclude_done="first", **common)
