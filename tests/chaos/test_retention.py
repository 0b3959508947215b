"""Records deleted before they were read: told, dropped by name, and never a silent jump."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from rig import Engine, Rig, rig

from rollstream.shared.log_reader import LogReader
from rollstream.shared.runs import RunConfig

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(300)]

GROUPS = 12
K = 2
ANSWERS = [{"text": f"{n} + 1 = {n + 1}", "delay_s": 2.0} for n in range(7)]
INPUT = {"generator": "prompts", "scorer": "rollouts", "sink": "scored"}


async def ends(made: Rig, topic: str, partitions: int) -> dict[int, int]:
    async with LogReader(made.bus, topic, range(partitions)) as log:
        await log.rewind()
        return await log.ends(30)


async def filled(made: Rig, config: RunConfig, topic: str, records: int) -> dict[int, int]:
    """Wait until the topic holds so many records; how many each partition has."""
    deadline_s, found = time.monotonic() + 90, {}
    while time.monotonic() < deadline_s:
        found = await ends(made, topic, config.partitions)
        if sum(found.values()) >= records:
            return found
        await asyncio.sleep(0.3)
    raise AssertionError(f"{topic} was not filled: {found}\n{made.logs()}")


@pytest.mark.parametrize("stage", ["generator", "scorer", "sink"])
async def test_what_was_deleted_before_it_was_read_is_dropped(
    real_kafka: str, kafka_admin: AIOKafkaAdminClient, prefix: str, tmp_path: Path,
    scripted: Engine, stage: str,
):
    """The stage is down while its input's older half is deleted; the rest is delivered."""
    names = ["sink", "scorer", "generator", "prompt-producer"]
    async with rig(real_kafka, prefix, tmp_path, scripted.url) as made:
        started = await made.services(*names)
        config = await made.run("sft", "short", epochs=1, total_groups=None, group_size=K,
                                env_args={"num_train": GROUPS}, max_in_flight=GROUPS * K)
        await made.kill(started[stage])
        topic = f"{prefix}.short.sft.{INPUT[stage]}"
        per_group = 1 if stage == "sink" else K
        before = await filled(made, config, topic, GROUPS * per_group)
        requests = scripted.finished_requests()
        cut = {p: end // 2 // per_group * per_group for p, end in before.items()}
        await kafka_admin.delete_records({
            TopicPartition(topic, p): RecordsToDelete(at) for p, at in cut.items() if at
        })
        again = await made.service(stage)
        await made.done(config)

        books = await made.books(config)
        lost = books.dropped.get("retention", 0)
        assert books.balanced
        assert (books.in_flight, books.parked) == (0, 0)
        assert books.delivered + lost == GROUPS
        assert len(made.dataset(config)) == books.delivered
        # What it had finished before it was killed stays; no more is lost than was deleted.
        assert 0 < lost <= sum(cut.values()) // per_group
        assert "deleted before they were read" in again.log.read_text()
        if stage != "generator":
            assert scripted.finished_requests() == requests, "something was generated again"
