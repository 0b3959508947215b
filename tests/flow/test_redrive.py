"""A broken rubric parks its groups; repaired, they are put back and end as if nothing had been."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from rig import Engine, Rig, rig

from rollstream.shared.records import DeadLetter, Kind
from rollstream.shared.runs import RunConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROWS, K = 6, 2
ANSWERS = [{"text": f"It is {n}."} for n in range(7)]
SERVICES = ("sink", "scorer", "generator", "prompt-producer")


@pytest.fixture
async def scripted(tmp_path: Path):
    engine = Engine(tmp_path / "scripted", ANSWERS)
    await engine.start()
    yield engine
    await engine.stop()


async def judged(made: Rig, pipeline: str = "sft", **fields: object) -> RunConfig:
    return await made.run(pipeline, "judged", env="judge_env", env_args={"rows": ROWS},
                          group_size=K, epochs=1, **fields)


async def test_parked_groups_are_redriven_after_the_run_has_ended(
    broker: str, admin: AIOKafkaAdminClient, prefix: str, tmp_path: Path, scripted: Engine,
    request: pytest.FixtureRequest,
):
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        steer = made.judge()
        (steer / "broken").touch()
        await made.services(*SERVICES)
        config = await judged(made)
        await made.done(config)
        books = await made.books(config)
        assert (books.parked, books.delivered, books.in_flight) == (ROWS, 0, 0)
        assert made.dataset(config) == []
        letters = [x for x in await made.records(config, "dlq") if isinstance(x, DeadLetter)]
        assert all(len(letter.inputs) == K and letter.inputs[0].key for letter in letters)
        listed = await made.command("dlq", "list", "judged")
        assert listed.count("parked") == ROWS
        assert "ZeroDivisionError: the rubric is broken" in listed
        assert "Say" in await made.command("dlq", "show", "judged", "0")

        # Still broken: they are parked again, and that is told.
        told = await made.command("dlq", "redrive", "judged", "--groups", "0-1")
        assert "put back 2 groups" in told
        await made.done(config)
        assert (await made.books(config)).parked == ROWS

        (steer / "broken").unlink()
        if "kafka" in request.node.name:
            # Days later: the rollouts have expired, the letters have not.
            rollouts = [TopicPartition(f"{prefix}.judged.sft.rollouts", p) for p in range(4)]
            await admin.delete_records(dict.fromkeys(rollouts, RecordsToDelete(-1)))
        assert "would put back 6" in await made.command("dlq", "redrive", "judged", "--dry-run")
        assert (await made.books(config)).parked == ROWS
        none = await made.command("dlq", "redrive", "judged", "--error", "ValueError")
        assert "put back 0 groups" in none
        await made.command("dlq", "redrive", "judged", "--stage", "scorer", "--rate", "50")
        await made.done(config)

        books = await made.books(config)
        assert (books.parked, books.delivered, books.in_flight) == (0, ROWS, 0)
        assert books.balanced
        lines = made.dataset(config)
        assert len(lines) == ROWS
        assert all(line["scores"][0] == line["scores"][1] >= 1 for line in lines)
        assert len({json.dumps(line["messages"]) for line in lines}) == ROWS
        # The rollouts' topic got no further rollout, only what was put back.
        assert await made.written(config, "rollouts") == ROWS * K + 2 + ROWS
        assert "put back 0 groups" in await made.command("dlq", "redrive", "judged")


async def test_some_groups_that_raise_stop_nobody_and_are_never_a_zero(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    """Redriven while the run goes on, through a second scorer behind the first."""
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        steer = made.judge()
        (steer / "poison").write_text("1 4")
        await made.services(*SERVICES)
        config = await judged(made)
        await made.done(config)
        books = await made.books(config)
        assert (books.parked, books.delivered) == (2, ROWS - 2)
        assert all(min(line["scores"]) >= 1 for line in made.dataset(config))
        scored = await made.records(config, "scored")
        parked = [group for group in scored if group.kind is Kind.PARKED]
        assert {group.reason for group in parked} == {"Unscorable"}
        assert all(sample.reward is None for group in parked for sample in group.samples)
        (steer / "poison").unlink()
        await made.command("dlq", "redrive", "judged")
        await made.done(config)
        assert (await made.books(config)).delivered == ROWS == len(made.dataset(config))
