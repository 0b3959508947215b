"""What a stage finds when it is given partitions: its commits, and its own output.

The own output is the truth; commit and hint only shorten the read (`delivery.md` rule 7).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import structlog
from aiokafka import ConsumerRecord

from rollstream.shared.codec import header_int, header_text
from rollstream.shared.commits import read_commits
from rollstream.shared.frontier import decode_hint
from rollstream.shared.log_reader import LogReader
from rollstream.shared.output_tail import read_to_end
from rollstream.shared.partition import Partition
from rollstream.shared.records import Kind
from rollstream.shared.runs import RunConfig
from rollstream.shared.seen import Unit
from rollstream.shared.service import RunContext

ENDS_TIMEOUT_S = 30.0


async def machines_from_commits(
    context: RunContext, partitions: Iterable[int]
) -> dict[int, Partition]:
    """A machine for each partition, standing where the group's commit says. Raises Lost."""
    machines = {p: Partition(context.run.partitions) for p in partitions}
    if not machines:
        return machines
    for p, commit in (await read_commits(context, machines)).items():
        machines[p] = machine_from_commit(context.run, commit.offset, commit.metadata)
    return machines


def machine_from_commit(run: RunConfig, offset: int, metadata: str | None) -> Partition:
    """Where a commit says that a partition stands; at its start where it is of another log.

    A broker that discards metadata (the embedded one) can't say which log it speaks of, but it
    keeps neither the log nor the commit.
    """
    hint = decode_hint(metadata)
    if hint is not None and hint.log_id != run.log_id:
        structlog.get_logger().warning(
            "a commit of another log of this run is left aside", run=run.run, log_id=hint.log_id
        )
        return Partition(run.partitions)
    return Partition(run.partitions, committed=offset, hint=hint)


async def deleted_unread(
    context: RunContext, positions: Mapping[int, int]
) -> tuple[dict[int, int], set[int]]:
    """Where the input begins after these positions, and where it ends before them.

    The first kept offset by partition, for what was deleted unread; and the partitions whose log
    was made anew. Both are loud: there is never a silent jump (rule 24). Raises Lost.
    """
    topic = context.topic(context.route.input or "")
    async with LogReader(context.bus, topic, positions) as log:
        first = await log.first(positions)
        log.position = dict(first)
        ends = await log.ends(ENDS_TIMEOUT_S)
    tell = structlog.get_logger().bind(
        run=context.run.run, stage=context.route.instance, topic=topic
    )
    short, beyond = dict[int, int](), set[int]()
    for p, position in positions.items():
        if position > ends[p]:
            tell.error("the input ends before our position: it is another log",
                       partition=p, position=position, end=ends[p])
            beyond.add(p)
        if position < first[p] or (p in beyond and first[p] > 0):
            tell.error("records were deleted before they were read", partition=p,
                       position=position, first_kept=first[p])
            short[p] = first[p]
    return short, beyond


async def read_own_output(context: RunContext, machines: dict[int, Partition]) -> None:
    """Tell each machine what the stage's output holds from its position on. Raises Lost."""
    topic = context.topic(context.route.output or "")

    def take(record: ConsumerRecord) -> None:
        headers = list(record.headers)
        n, k = header_int(headers, "rs-group"), header_int(headers, "rs-k")
        if n is None or k is None:
            return
        unit = Unit(n, header_int(headers, "rs-sample"))
        parked = None
        if header_text(headers, "rs-kind") == Kind.PARKED:
            parked = header_int(headers, "rs-redrives") or 0
        machines[record.partition].found(unit, k, record.offset, parked=parked)

    def gone(partition: int, first: int) -> None:
        position = machines[partition].out_position
        structlog.get_logger().error(
            "output position is gone, reading from the start", topic=topic, partition=partition,
            position=position, first_kept=first, run=context.run.run,
            stage=context.route.instance,
        )
        if first <= position:
            # It ends before our position: it was made anew, and what the commit calls done is not
            # in it. The output is the truth.
            machines[partition] = Partition(context.run.partitions)

    starts = {p: machine.out_position for p, machine in machines.items()}
    await read_to_end(context.bus, topic, starts, take, gone=gone)
