"""What a stage's consumer group has committed of its input."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from aiokafka.structs import OffsetAndMetadata

from rollstream.shared.bus import Lost, start, stop
from rollstream.shared.frontier import decode_hint
from rollstream.shared.service import RunContext

ANSWER_S = 30.0


async def ask_commits(
    admin: AIOKafkaAdminClient, stage: RunContext, partitions: Iterable[int],
    timeout_s: float = ANSWER_S,
) -> dict[int, OffsetAndMetadata]:
    """The stage's commits by partition, for those that have one.

    Raises KafkaError and TimeoutError.
    """
    topic = stage.topic(stage.route.input or "")
    # Asked for by name: without partitions the embedded broker cuts the connection.
    asked = [TopicPartition(topic, p) for p in partitions]
    answer = await asyncio.wait_for(
        admin.list_consumer_group_offsets(stage.group, partitions=asked), timeout_s
    )
    return {tp.partition: commit for tp, commit in answer.items() if commit.offset >= 0}


async def read_commits(
    stage: RunContext, partitions: Iterable[int]
) -> dict[int, OffsetAndMetadata]:
    """The same, with a client of its own. Raises Lost."""
    admin = stage.bus.admin()
    try:
        await start(admin)
        return await ask_commits(admin, stage, partitions)
    except (KafkaError, TimeoutError) as error:
        raise Lost.because(f"could not read the commits of {stage.group}", error) from error
    finally:
        await stop(admin)


async def others_know(stage: RunContext, partitions: Iterable[int]) -> bool:
    """Whether the commits of all these say that their member goes on with what it has at work."""
    partitions = list(partitions)
    try:
        commits = await read_commits(stage, partitions)
    except Lost:
        return False
    hints = [decode_hint(commit.metadata) for commit in commits.values()]
    return len(hints) == len(partitions) and all(hint and hint.going_on_s for hint in hints)
