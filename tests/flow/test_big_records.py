"""Records too big for their topics: the same results by the object store; losses are parked."""

from __future__ import annotations

from pathlib import Path

import pytest
from rig import Engine, rig

from rollstream.shared.records import DeadLetter
from rollstream.shared.runs import BlobSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROWS, K = 6, 2
ANSWERS = [{"text": "It is 1."}]


async def test_big_records_go_by_way_of_the_store(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    """Every kind of record is big here; objects of one group are lost, and come back."""
    store = tmp_path / "blobs"
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        made.judge()
        started = await made.services("sink", "scorer", "generator", "prompt-producer")
        config = await made.run(
            "sft", "big", env="judge_env", env_args={"rows": ROWS}, group_size=K, epochs=1,
            blobs=BlobSettings(store.as_uri(), 1),
        )
        await made.kill(started["scorer"])
        await made.filled(config, "rollouts", ROWS * K)
        rollouts = await made.records(config, "rollouts")
        assert all(r.bodies is not None and not r.completion for r in rollouts)
        lost = store / prefix / "big" / config.log_id / "rollouts"
        aside = [path.rename(tmp_path / path.name) for path in lost.glob("3-*")]
        assert len(aside) == K
        await made.service("scorer")
        await made.done(config)
        books = await made.books(config)
        assert (books.delivered, books.parked, books.in_flight) == (ROWS - 1, 1, 0)
        letters = [x for x in await made.records(config, "dlq") if isinstance(x, DeadLetter)]
        assert [(letter.n, letter.error.type) for letter in letters] == [(3, "blob_missing")]
        refused = await made.command("dlq", "redrive", "big", code=1)
        assert "restore it first" in refused

        for path in aside:
            path.rename(lost / path.name)
        assert "put back 1 groups" in await made.command("dlq", "redrive", "big")
        await made.done(config)
        lines = made.dataset(config)
        assert len(lines) == ROWS == (await made.books(config)).delivered
        assert all("It is 1." in str(line["messages"]) for line in lines)
        assert "0 orphans" in await made.command("blobs", "big")
        await made.command("runs", "rm", "big")
        assert not [path for path in store.rglob("*") if path.is_file()]
