"""`rollstream ledger` finds every sample in flight, and raises an alarm for what it can't find."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from rig import Engine, Rig, rig

from rollstream.shared.log_reader import LogReader
from rollstream.shared.runs import RunConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GROUPS, K = 8, 2
ANSWERS = [{"text": "1", "delay_s": 1.0}]


async def places(made: Rig, config: RunConfig, code: int = 0) -> list[dict]:
    said = await made.command("ledger", config.run, "--json", code=code)
    return json.loads(said)["leaves"]["dataset"]["places"]


async def commit_past_everything(made: Rig, group: str, topic: str, partitions: int) -> None:
    """What no member of ours ever does: call done what has no output."""
    consumer = AIOKafkaConsumer(bootstrap_servers=made.bus.bootstrap, group_id=group,
                                enable_auto_commit=False)
    await consumer.start()
    async with LogReader(made.bus, topic, range(partitions)) as log:
        ends = {TopicPartition(topic, p): end for p, end in (await log.ends(30)).items()}
    consumer.assign(list(ends))
    await consumer.commit(ends)
    await consumer.stop()


async def test_everything_in_flight_is_found_until_something_is_lost(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        started = await made.services("sink", "scorer", "generator", "prompt-producer")
        config = await made.run("sft", "audited", epochs=1, group_size=K, max_in_flight=100,
                                env_args={"num_train": GROUPS})
        await made.kill(started["scorer"])
        during = await places(made, config)
        assert all(place["state"] != "nowhere" for place in during)

        await made.filled(config, "rollouts", GROUPS * K)
        found = await places(made, config)
        assert {(place["n"], place["i"]) for place in found} == {
            (n, i) for n in range(GROUPS) for i in range(K)
        }
        assert {place["stage"] for place in found} == {"scorer"}
        assert {place["state"] for place in found} <= {"queued", "running", "waiting"}
        said = await made.command("ledger", "audited")
        assert "[balanced]" in said
        assert "ALARM" not in said

        await asyncio.sleep(7)  # the dead member's session has to end before others may commit
        await commit_past_everything(
            made, f"{prefix}.audited.sft.scorer", f"{prefix}.audited.sft.rollouts", 4
        )
        said = await made.command("ledger", "audited", code=1)
        assert said.count("ALARM: sample") == GROUPS * K
        assert "ALARM: sample 3/1 is found nowhere: scorer has passed its record" in said


async def test_without_a_generator_everything_is_queued_there(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        started = await made.services("sink", "scorer", "generator", "prompt-producer")
        config = await made.run("sft", "waiting", epochs=1, group_size=K, max_in_flight=GROUPS * K,
                                env_args={"num_train": GROUPS})
        await made.kill(started["generator"])
        await made.filled(config, "prompts", GROUPS * K)
        found = await places(made, config)
        answered = {(r.n, r.i) for r in await made.records(config, "rollouts")}
        assert {(p["n"], p["i"]) for p in found if p["stage"] == "generator"} == {
            (n, i) for n in range(GROUPS) for i in range(K)
        } - answered
        assert len(answered) < GROUPS * K
        assert {p["state"] for p in found if p["stage"] == "generator"} <= {
            "queued", "running", "waiting"
        }
        assert "ALARM" not in await made.command("ledger", "waiting")
        await made.service("generator")
        await made.done(config)


async def test_a_live_run_raises_no_alarm(
    broker: str, prefix: str, tmp_path: Path, scripted: Engine
):
    async with rig(broker, prefix, tmp_path, scripted.url) as made:
        await made.services("sink", "scorer", "generator", "prompt-producer")
        config = await made.run("sft", "live", total_groups=30, group_size=K, max_in_flight=16)
        looks = 0
        while (await made.books(config)).delivered < 30:
            said = await made.command("ledger", "live")
            assert "ALARM" not in said
            assert "no process attends" not in said
            looks += "generator" in said
        assert looks
        await made.done(config)
        assert "in flight 0  [balanced]" in await made.command("ledger", "live")
