"""One run's loop in one stage instance: the only consumer I/O between two topics.

Reads the stage's input as a member of its consumer group, has the step work on it, writes each
output to the partition number that the input came from, and commits the frontier. What may be
done when is decided by `partition.Partition`; this is the thin shell around it.

Invariants
- The stage's own output is the truth: after an assignment it is read from the hint's position to
  its end before anything is dispatched (`delivery.md` rule 7).
- An offset is done when its output is acknowledged. Every commit is explicit and bounded in time.
- A rebalance throws the machines away, never the tasks: what still runs here is adopted.
- "Not mine any more" ends the attempt (Lost); the supervisor starts the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import msgspec
import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import (
    CommitFailedError,
    IllegalStateError,
    KafkaError,
    OffsetOutOfRangeError,
)

from rollstream.shared.bus import Bus, ConsumerRebalanceListener, Lost, Writer, start, stop
from rollstream.shared.commits import others_know
from rollstream.shared.frontier import encode_hint
from rollstream.shared.handover import HANDOVER_S, Handover
from rollstream.shared.intake import Intake, Work
from rollstream.shared.log_reader import has_read_all
from rollstream.shared.metrics import COMMIT_LAG, GROUPS_OPEN, IN_FLIGHT, Metrics
from rollstream.shared.partition import Partition
from rollstream.shared.records import Rollout
from rollstream.shared.refetch import Refetch
from rollstream.shared.retention import find_lost
from rollstream.shared.runs import Status
from rollstream.shared.seen import Unit
from rollstream.shared.service import RunContext
from rollstream.shared.step import Step
from rollstream.shared.takeover import deleted_unread, machines_from_commits, read_own_output
from rollstream.shared.worker import Worker

COMMIT_EVERY_S = 0.5
COMMIT_TIMEOUT_S = 10.0
REVOKE_COMMIT_TIMEOUT_S = 5.0
POLL_MS = 200
LATER_CHECK_S = 5.0


class StageLoop:
    """Attends one run with one step until it is drained, cancelled or lost."""

    def __init__(self, context: RunContext, step: Step, produces: str) -> None:
        if context.route.input is None or context.route.output is None:
            raise ValueError(f"{context.route.instance} has no input or no output")
        self._context = context
        self._bus: Bus = context.bus
        self._step = step
        self._in_topic = context.topic(context.route.input)
        self._intake = Intake(context, step, produces)
        self._refetch = Refetch(context.bus, self._in_topic)
        self._machines: dict[int, Partition] = {}
        self._ready: deque[Work] = deque()
        self._later = Handover(context.run.deadlines.sample_s)
        self._tasks: dict[tuple[int, Unit], asyncio.Task[None]] = {}
        self._assigned: set[int] | None = None
        self._fatal: BaseException | None = None
        self._wake = asyncio.Event()
        self._committed_at_s = 0.0
        self._later_checked_s = 0.0
        self._gaps: dict[int, int] = {}
        """Output positions above which somebody else wrote, as of the last check."""
        self._metrics = Metrics(context.run.pipeline, context.route.instance)
        self._gauges = [
            self._metrics.gauge(IN_FLIGHT, lambda: len(self._tasks)),
            self._metrics.gauge(GROUPS_OPEN, lambda: self._intake.open_groups),
            self._metrics.gauge(COMMIT_LAG, self._uncommitted, topic=self._in_topic),
        ]
        self._log = structlog.get_logger().bind(
            run=context.run.run, stage=context.route.instance, topic=self._in_topic
        )

    async def run(self) -> None:
        """Work until drained. Raises Lost, Blocked or TooManyFailures where the attempt is over."""
        writer = await self._bus.writer()
        self._worker = Worker(self._context, self._step, self._intake.produces, writer)
        consumer = self._bus.member(self._context.group)
        try:
            consumer.subscribe([self._in_topic], listener=_Listener(self, consumer))
            await start(consumer)
            await self._loop(consumer)
        finally:
            await self._end(consumer, writer)

    async def _loop(self, consumer: AIOKafkaConsumer) -> None:
        ending_s: float | None = None
        while True:
            if self._fatal is not None:
                raise self._fatal
            if self._assigned is not None:
                await self._take_over(consumer)
            paused = self._context.status is Status.PAUSED
            if not paused:
                self._dispatch()
            if self._context.ending:
                if ending_s is None:
                    ending_s = time.monotonic()
                    await self._leave(consumer)
                if not self._tasks or time.monotonic() - ending_s > self._context.drain_s:
                    await self._commit(consumer)
                    return
                await self._pause()
            elif paused:
                await self._pause()
            else:
                await self._poll(consumer)
            await self._check_later()
            await self._expire(consumer)
            if time.monotonic() - self._committed_at_s >= COMMIT_EVERY_S:
                await self._commit(consumer)
            self._report()

    async def _poll(self, consumer: AIOKafkaConsumer) -> None:
        """Read as much as there is room for; wait for room where there is none."""
        room = self._step.max_in_flight - len(self._tasks) - len(self._ready)
        if room <= 0:
            await self._pause()
            return
        # A group needs k records to become one piece of work: read in bigger bites there.
        most = 500 if self._step.groups else max(room, 1)
        try:
            got = await consumer.getmany(timeout_ms=POLL_MS, max_records=most)
        except OffsetOutOfRangeError as error:
            # The next attempt looks at what is left of the log before it reads (`takeover`).
            raise Lost(f"{self._in_topic} no longer holds {error.args[0]}") from error
        except IllegalStateError:
            # The assignment changed between two awaits (aiokafka issue 929).
            return
        except KafkaError as error:
            raise Lost(f"could not read {self._in_topic}: {error}") from error
        for tp, records in got.items():
            machine = self._machines.get(tp.partition)
            if machine is None or self._assigned is not None:
                continue
            self._metrics.consumed(self._in_topic, len(records))
            for record in records:
                self._take(machine, record)
        now_s = time.time()
        for partition in self._machines:
            tp = TopicPartition(self._in_topic, partition)
            if tp not in got and await has_read_all(consumer, tp):
                self._intake.at_end(partition, now_s)

    def _take(self, machine: Partition, record: ConsumerRecord) -> None:
        for work in self._intake.read(machine, record):
            if (record.partition, work.unit) in self._tasks:
                continue
            if work.later:
                self._later.add(work, time.monotonic(), machine.going_on_s)
            else:
                self._ready.append(work)

    def _dispatch(self) -> None:
        while self._ready and len(self._tasks) < self._step.max_in_flight:
            work = self._ready.popleft()
            key = (work.partition, work.unit)
            machine = self._machines.get(work.partition)
            if key in self._tasks or machine is None:
                continue
            if work.k > 0 and not machine.in_flight(work.unit):
                continue
            task = asyncio.create_task(self._work(work))
            self._tasks[key] = task
            task.add_done_callback(lambda _, key=key: self._tasks.pop(key, None))

    async def _work(self, work: Work) -> None:
        try:
            await self._refetch.fill(work)
            ended = await self._worker.perform(work)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fatal = self._fatal or error
            self._wake.set()
            return
        machine = self._machines.get(work.partition)
        if machine is not None:
            machine.finished(work.unit, work.k, ended.offset, parked=ended.parked)
            self._intake.settled(work.partition, work.unit)
            if ended.parked is not None and machine.in_flight(work.unit):
                # The next attempt reads the later try again, and knows that this one is parked.
                self._fatal = self._fatal or Lost(
                    f"group {work.unit.n} was put back while an earlier try was at work"
                )
        self._context.progress.done += 1
        self._context.progress.failed += ended.parked is not None
        self._context.progress.last_progress_s = time.time()
        self._wake.set()

    async def _pause(self) -> None:
        """Wait for a task to end, for a moment at most."""
        self._wake.clear()
        try:
            await asyncio.wait_for(self._wake.wait(), POLL_MS / 1000)
        except TimeoutError:
            pass

    # -- assignment ---------------------------------------------------------------------------

    def assigned(self, consumer: AIOKafkaConsumer, partitions: set[TopicPartition]) -> None:
        """From the rebalance callback: nothing is fetched before the own output was read."""
        for tp in partitions:
            consumer.pause(tp)
            # A position, any position: without one `auto_offset_reset="none"` raises.
            consumer.seek(tp, 0)
        self._assigned = {tp.partition for tp in partitions}
        self._bus.rejoins.joined(self._context.group, time.monotonic())
        self._wake.set()

    async def revoked(self, consumer: AIOKafkaConsumer) -> None:
        """From the rebalance callback: one bounded commit, then return; the tasks run on."""
        if not self._machines:
            return
        await self._commit(consumer, going_on_s=HANDOVER_S)
        self._machines = {}
        self._forget()

    async def _leave(self, consumer: AIOKafkaConsumer) -> None:
        """Others have the partitions at once; what is at work here is finished meanwhile.

        Only where the broker kept what the commit says of it: else others would begin it again.
        """
        if self._step.groups or not self._tasks or self._assigned is not None:
            return
        await self._commit(consumer, going_on_s=self._context.drain_s)
        if await others_know(self._context, self._machines):
            self._machines = {}
            self._forget()
            await stop(consumer)
            self._assigned = None

    def _forget(self) -> None:
        """Let go of what was read and is not at work."""
        self._ready.clear()
        self._later.clear()
        self._intake.forget()

    async def _take_over(self, consumer: AIOKafkaConsumer) -> None:
        """Build the machines of what is assigned: commit and hint, own output, then resume."""
        partitions, self._assigned = self._assigned or set(), None
        self._forget()
        machines = await machines_from_commits(self._context, partitions)
        short = await self._fit_to_input(machines)
        # From here on, tasks that finish are told to the new machines.
        self._machines = machines
        await read_own_output(self._context, machines)
        if short:
            await self._end_lost(short)
        if self._assigned is not None:
            return
        for p, machine in machines.items():
            tp = TopicPartition(self._in_topic, p)
            try:
                consumer.seek(tp, machine.next_offset)
                consumer.resume(tp)
            except IllegalStateError:
                return
        self._context.progress.partitions = sorted(machines)
        self._log.info(
            "assigned", partitions=sorted(machines), adopted=len(self._tasks),
            offsets={p: m.next_offset for p, m in machines.items()},
        )

    async def _fit_to_input(self, machines: dict[int, Partition]) -> dict[int, int]:
        """Start over where the input was made anew; the first kept offsets where it is shorter."""
        if not machines:
            return {}
        positions = {p: machine.next_offset for p, machine in machines.items()}
        short, beyond = await deleted_unread(self._context, positions)
        machines |= {p: Partition(self._context.run.partitions) for p in beyond}
        return short

    async def _end_lost(self, first: dict[int, int]) -> None:
        """End what was deleted before it was read; the input goes on at the first kept offset."""
        machines, partitions = self._machines, self._context.run.partitions
        lost = await find_lost(
            self._context, first, lambda unit: machines[unit.n % partitions].knows(unit),
            samples=self._intake.produces is Rollout,
        )
        for p, found in lost.items():
            machines[p].deleted([one.unit for one in found], first[p])
            self._ready.extend(self._intake.lost(p, one) for one in found)
            if found:
                self._log.error("records were deleted before they were read: dropped",
                                partition=p, lost=len(found), first_n=found[0].unit.n)

    # -- commit, late work, deadlines ----------------------------------------------------------

    async def _commit(self, consumer: AIOKafkaConsumer, *, going_on_s: float = 0.0) -> None:
        self._committed_at_s = time.monotonic()
        if self._assigned is not None and not going_on_s:
            return
        offsets: dict[TopicPartition, tuple[int, str]] = {}
        keep_s = 0.0 if self._step.groups else going_on_s
        for p, machine in self._machines.items():
            if (commit := machine.commit(going_on_s=keep_s)) is not None:
                tp = TopicPartition(self._in_topic, p)
                hint = msgspec.structs.replace(commit.hint, log_id=self._context.run.log_id)
                offsets[tp] = (commit.offset, encode_hint(hint))
        if not offsets:
            return
        try:
            await asyncio.wait_for(
                consumer.commit(offsets),
                REVOKE_COMMIT_TIMEOUT_S if going_on_s else COMMIT_TIMEOUT_S,
            )
        except (CommitFailedError, IllegalStateError, KafkaError, TimeoutError) as error:
            # Only a shorter way for the next owner; if the partitions are gone, an assignment
            # follows and builds everything anew from the output (aiokafka issues 929, 933).
            self._log.debug("commit failed", error=str(error) or type(error).__name__)
            for machine in self._machines.values():
                machine.commit_failed()

    async def _check_later(self) -> None:
        """Look at the output again for what an old owner has finished; then do what is left."""
        now_s = time.monotonic()
        if now_s - self._later_checked_s < LATER_CHECK_S:
            return
        self._later_checked_s = now_s
        gaps = {p: m.out_position for p, m in self._machines.items() if m.has_gap}
        lasting = {p for p, position in gaps.items() if self._gaps.get(p) == position}
        self._gaps = gaps
        lasting |= self._later.partitions
        concerned = {p: m for p, m in self._machines.items() if p in lasting}
        if not concerned:
            return
        known = dict(concerned)
        await read_own_output(self._context, concerned)
        if known != concerned:
            raise Lost("the own output was made anew")
        self._ready.extend(self._later.due(now_s, self._machines))

    async def _expire(self, consumer: AIOKafkaConsumer) -> None:
        """Close groups whose missing samples will not come (rule 15)."""
        if not self._step.groups or self._assigned is not None:
            return
        for work in await self._intake.expired(time.time(), self._machines):
            if (work.partition, work.unit) not in self._tasks:
                self._ready.append(work)

    def _uncommitted(self) -> float:
        """Records that were read and are not done."""
        return sum(machine.open_offsets for machine in self._machines.values())

    def _report(self) -> None:
        progress = self._context.progress
        progress.in_flight = len(self._tasks)
        progress.queued = len(self._ready) + len(self._later)
        progress.open_groups = self._intake.open_groups
        progress.state = "working" if self._machines else "standby"
        progress.alive()

    async def _end(self, consumer: AIOKafkaConsumer, writer: Writer) -> None:
        for unregister in self._gauges:
            unregister()
        for task in list(self._tasks.values()):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=5)
        await self._refetch.close()
        await stop(consumer)
        await writer.close()


class _Listener(ConsumerRebalanceListener):
    """aiokafka's callbacks; both must be quick (aiokafka is eager: everything is revoked)."""

    def __init__(self, loop: StageLoop, consumer: AIOKafkaConsumer) -> None:
        self._loop = loop
        self._consumer = consumer

    def on_partitions_revoked(self, revoked: Any) -> Any:
        return self._loop.revoked(self._consumer)

    def on_partitions_assigned(self, assigned: Any) -> None:
        self._loop.assigned(self._consumer, set(assigned))


async def run_stage(context: RunContext, step: Step, produces: str) -> None:
    """Attend a run with a step; `produces` names the record of the output topic."""
    await StageLoop(context, step, produces).run()
