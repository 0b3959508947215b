"""Groups that wait for samples: over the byte budget their bodies are left in the log (rule 14)."""

from __future__ import annotations

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from making import run

from rollstream.shared.bus import Bus, Lost
from rollstream.shared.intake import Intake, Work
from rollstream.shared.partition import Partition
from rollstream.shared.records import EnvRef, Rollout, Row, Stop
from rollstream.shared.refetch import Refetch
from rollstream.shared.service import RunContext
from rollstream.shared.step import Step

K, GROUPS = 3, 4


def rollout(n: int, i: int) -> Rollout:
    return Rollout(
        run="r", pipeline="rl", n=n, i=i, k=K, env=EnvRef("e"), stop=Stop.STOP, prompt_offset=7,
        row=Row(prompt=[{"role": "user", "content": f"question {n}"}]),
        completion=[{"role": "assistant", "content": f"answer {n}.{i} " + "x" * 500}],
    )


async def score(_: list[Rollout]) -> None:
    raise AssertionError("not called here")


async def read_all(bus: Bus, topic: str, budget_bytes: int) -> tuple[list[Work], int]:
    """What comes of a topic whose groups are all open until the end; the most that was held."""
    config = run(partitions=1, group_size=K)
    step = Step(group=score, max_open_bytes=budget_bytes)  # type: ignore[arg-type]
    intake = Intake(RunContext(config, config.stage("scorer"), bus), step, "Scored")
    machine, works, most = Partition(1), [], 0
    consumer: AIOKafkaConsumer = bus.reader()
    await consumer.start()
    tp = TopicPartition(topic, 0)
    consumer.assign([tp])
    consumer.seek(tp, 0)
    while machine.next_offset < K * GROUPS:
        for record in (await consumer.getmany(timeout_ms=500)).get(tp, []):
            works += intake.read(machine, record)
            most = max(most, intake.open_bytes)
    await consumer.stop()
    assert intake.open_bytes == 0
    return works, most


@pytest.fixture
async def written(broker: str, prefix: str, admin: AIOKafkaAdminClient) -> tuple[Bus, str]:
    return await write_all(broker, admin, f"{prefix}.rollouts")


async def write_all(bootstrap: str, admin: AIOKafkaAdminClient, topic: str) -> tuple[Bus, str]:
    """Sample 0 of every group, then sample 1, ...: all groups are open for long."""
    bus = Bus(bootstrap, "budget")
    await admin.create_topics([NewTopic(topic, 1, 1)])
    writer = await bus.writer()
    for i in range(K):
        for n in range(GROUPS):
            await writer.send(topic, 0, rollout(n, i))
    await writer.close()
    return bus, topic


async def test_what_was_left_in_the_log_comes_back_whole(written: tuple[Bus, str]):
    bus, topic = written
    within, held = await read_all(bus, topic, 1 << 30)
    assert not any(work.left_in_log for work in within)
    over, held_over = await read_all(bus, topic, 2000)
    assert held_over <= 2000 < held
    assert any(work.left_in_log for work in over)
    refetch = Refetch(bus, topic)
    for work in over:
        await refetch.fill(work)
    await refetch.close()
    assert [work.given for work in over] == [work.given for work in within]
    assert [[o.value for o in work.inputs] for work in over] == [
        [o.value for o in work.inputs] for work in within
    ]
    assert [work.unit.n for work in over] == list(range(GROUPS))


@pytest.mark.kafka
async def test_what_the_log_no_longer_holds_ends_the_attempt(
    real_kafka: str, prefix: str, kafka_admin: AIOKafkaAdminClient
):
    from aiokafka.admin import RecordsToDelete

    bus, topic = await write_all(real_kafka, kafka_admin, f"{prefix}.rollouts")
    works, _ = await read_all(bus, topic, 0)
    await kafka_admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(4)})
    refetch = Refetch(bus, topic)
    with pytest.raises(Lost, match="no longer holds"):
        await refetch.fill(works[0])
    await refetch.close()
