"""What a stage finds when it is given partitions: its commits, and its own output.

The own output is the truth; commit and hint only shorten the read (`delivery.md` rule 7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import structlog
from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from rollstream.shared.bus import Lost, start, stop
from rollstream.shared.codec import header_int, header_text
from rollstream.shared.frontier import decode_hint
from rollstream.shared.output_tail import read_to_end
from rollstream.shared.partition import Partition
from rollstream.shared.records import Kind
from rollstream.shared.seen import Unit
from rollstream.shared.service import RunContext

COMMITS_TIMEOUT_S = 30.0


async def machines_from_commits(
    context: RunContext, partitions: Iterable[int]
) -> dict[int, Partition]:
    """A machine for each partition, standing where the group's commit says. Raises Lost."""
    machines = {p: Partition(context.run.partitions) for p in partitions}
    if not machines:
        return machines
    topic = context.topic(context.route.input or "")
    admin = context.bus.admin()
    await start(admin)
    try:
        # Asked for by name: without partitions the embedded broker cuts the connection.
        asked = [TopicPartition(topic, p) for p in machines]
        answer = await asyncio.wait_for(
            admin.list_consumer_group_offsets(context.group, partitions=asked), COMMITS_TIMEOUT_S
        )
    except (KafkaError, TimeoutError) as error:
        raise Lost(f"could not read the commits of {context.group}: {error}") from error
    finally:
        await stop(admin)
    for tp, commit in answer.items():
        if commit.offset >= 0:
            machines[tp.partition] = Partition(
                context.run.partitions, committed=commit.offset, hint=decode_hint(commit.metadata)
            )
    return machines


async def read_own_output(context: RunContext, machines: dict[int, Partition]) -> None:
    """Tell each machine what the stage's output holds from its position on. Raises Lost."""
    topic = context.topic(context.route.output or "")

    def take(record: ConsumerRecord) -> None:
        headers = list(record.headers)
        n, k = header_int(headers, "rs-group"), header_int(headers, "rs-k")
        if n is None or k is None:
            return
        unit = Unit(n, header_int(headers, "rs-sample"))
        parked = header_text(headers, "rs-kind") == Kind.PARKED
        machines[record.partition].found(unit, k, record.offset, parked=parked)

    def gone(partition: int) -> None:
        structlog.get_logger().error(
            "output position is gone, reading from the start", topic=topic, partition=partition,
            position=machines[partition].out_position, run=context.run.run,
            stage=context.route.instance,
        )

    starts = {p: machine.out_position for p, machine in machines.items()}
    await read_to_end(context.bus, topic, starts, take, gone=gone)
