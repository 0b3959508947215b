"""A file leaf at work: reads group records, decides, and keeps the decisions as parts.

Part, then ledger, then commit: whatever is killed between, the parts are the truth and the rest is
made good from them at the next start (`delivery.md` rule 18). Two ways to own partitions: `share`
them as a member of a consumer group (dataset), or read them all `alone` (report).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, ConsumerRecord, OffsetAndMetadata, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from rollstream.services.sink.decide import Decider, Decision
from rollstream.services.sink.ends import write_ends
from rollstream.services.sink.intake import Intake
from rollstream.services.sink.parts import Folder, Line, PartFile, read_lines
from rollstream.shared.bus import ConsumerRebalanceListener, Lost, Writer, start, stop
from rollstream.shared.control import Finished
from rollstream.shared.ledger_reader import LedgerReader
from rollstream.shared.log_reader import LogReader
from rollstream.shared.records import Ended, Outcome
from rollstream.shared.retention import find_lost
from rollstream.shared.role import Active
from rollstream.shared.runs import Status
from rollstream.shared.seen import Seen
from rollstream.shared.service import RunContext
from rollstream.shared.takeover import deleted_unread

FLUSH_GROUPS = 64
FLUSH_S = 1.0
POLL_S = 0.2
COMMIT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 600.0

T = TypeVar("T")
Finish = Callable[[list[PartFile]], None]


class _Kept:
    """What the parts of a partition hold, as far as this process has checked them."""

    def __init__(self, partitions: int) -> None:
        self.end = 0
        self.seen = Seen(partitions)

    def add(self, n: int, outcome: Outcome, redrives: int) -> None:
        if outcome is Outcome.PARKED:
            self.seen.park(n, redrives)
        else:
            self.seen.add_group(n)


class _Open:
    """An owned partition: decided and not yet written."""

    def __init__(self, decider: Decider, position: int) -> None:
        self.decider = decider
        self.start = position
        """Where the next part starts."""
        self.position = position
        """Offset of the next record."""
        self.buffer: list[Decision] = []
        self.due_s = 0.0

    def take(self, record: ConsumerRecord, decision: Decision | None, now_s: float) -> None:
        self.position = record.offset + 1
        if decision is None:
            return
        if not self.buffer:
            self.due_s = now_s + FLUSH_S
        self.buffer.append(decision)

    def skip_to(self, first: int, lost: list[int]) -> None:
        """The log begins here now; these groups were deleted unread. Due at once."""
        self.buffer += [d for n in lost if (d := self.decider.decide_lost(n)) is not None]
        self.position = first

    def due(self, now_s: float) -> bool:
        return len(self.buffer) >= FLUSH_GROUPS or (bool(self.buffer) and now_s >= self.due_s)


class FileLeaf:
    """One file leaf of one run, for one attempt.

    `finish` makes the final files from all parts, in a thread, when every group has ended.
    """

    def __init__(
        self, context: RunContext, folder: Folder, finish: Finish, *,
        min_score: float | None = None,
    ) -> None:
        assert context.route.input is not None
        assert context.route.leaf is not None
        self._context = context
        self._folder = folder
        self._finish = finish
        self._min_score = min_score
        self._leaf = context.route.leaf
        self._topic = context.topic(context.route.input)
        self._partitions = context.run.partitions
        self._kept = {p: _Kept(self._partitions) for p in range(self._partitions)}
        self._restored: dict[int, Line] = {}
        self._open: dict[int, _Open] = {}
        self._intake = Intake(
            context.run, self._topic, context.progress, keep_dropped=folder.keep_dropped
        )

    # -- owning partitions ---------------------------------------------------------------------

    async def share(self) -> None:
        """Work on the partitions that the consumer group gives us, until the run is done."""
        async with self._tools() as (writer, ledger):
            consumer = self._context.bus.member(self._context.group)
            assigned: set[int] = set()
            consumer.subscribe([self._topic], listener=_Listener(
                self._context, consumer, assigned, self._open
            ))
            try:
                await start(consumer)
                while not self._over:
                    self._report()
                    if assigned:
                        opened, _ = set(assigned), assigned.clear()
                        await self._take_over(consumer, opened, writer, ledger)
                    for record in await self._next(consumer):
                        await self._take(record)
                    await self._flush_due(writer, consumer)
                await self._flush_all(writer, consumer)
                await self._end(writer, ledger)
            except (KafkaError, TimeoutError) as error:
                raise Lost.because(self._topic, error) from error
            finally:
                await stop(consumer)

    async def alone(self, active: Active) -> None:
        """Work on all partitions while the role is ours, until the run is done."""
        async with self._tools(active.writer) as (writer, ledger):
            partitions = range(self._partitions)
            async with LogReader(self._context.bus, self._topic, partitions) as reader:
                await self._open_up(partitions, writer, ledger)
                reader.position = {p: self._open[p].position for p in partitions}
                async for records in reader.to_end(READ_TIMEOUT_S):
                    for record in records:
                        await self._take(record)
                    await self._flush_due(writer)
                while not self._over:
                    self._report()
                    for record in await reader.more(POLL_S):
                        await self._take(record)
                    await self._flush_due(writer)
                await self._flush_all(writer)
                await self._end(writer, ledger)

    @contextlib.asynccontextmanager
    async def _tools(
        self, writer: Writer | None = None
    ) -> AsyncIterator[tuple[Writer, LedgerReader]]:
        self._restored = await self._files(self._folder.restored)
        own = writer or await self._context.bus.writer()
        try:
            async with LedgerReader(self._context.bus, self._context.run) as ledger:
                yield own, ledger
        finally:
            if writer is None:
                await own.close()

    @property
    def _over(self) -> bool:
        return self._context.ending or self._context.status is Status.FINISHING

    async def _end(self, writer: Writer, ledger: LedgerReader) -> None:
        """Make the final files, where it is the run and not only this process that ends.

        With several members each makes the same ones: who dies in the middle is not missed.
        """
        context = self._context
        if context.draining.is_set() or context.status is not Status.FINISHING:
            return
        # Counted first: a part is there before its ends, so the files hold at least these.
        books = (await ledger.catch_up(READ_TIMEOUT_S)).books()
        ended = next(leaf.ended for leaf in books if leaf.leaf == self._leaf)
        await self._files(lambda: self._finish(self._folder.everything(self._partitions)))
        await writer.send(context.topic("control"), 0, Finished(leaf=self._leaf, ended=ended))
        # Done comes next, or a redrive that opens the run again: then the next attempt goes on.
        while context.status is Status.FINISHING and not context.ending:
            await asyncio.sleep(POLL_S)

    def _report(self) -> None:
        progress = self._context.progress
        progress.state = "working" if self._open else "standby"
        progress.partitions = sorted(self._open)
        progress.in_flight = sum(len(state.buffer) for state in self._open.values())
        progress.alive()

    async def _files(self, work: Callable[[], T]) -> T:
        """Work on files, beside the event loop."""
        return await asyncio.to_thread(work)

    async def _take_over(
        self, consumer: AIOKafkaConsumer, partitions: set[int], writer: Writer,
        ledger: LedgerReader,
    ) -> None:
        """Go on where the parts end. The listener has paused these partitions."""
        await self._open_up(partitions, writer, ledger)
        for partition in partitions:
            tp = TopicPartition(self._topic, partition)
            if tp not in consumer.assignment() or partition not in self._open:
                self._open.pop(partition, None)  # taken away again meanwhile
                continue
            consumer.seek(tp, self._open[partition].position)
            consumer.resume(tp)

    async def _next(self, consumer: AIOKafkaConsumer) -> list[ConsumerRecord]:
        try:
            async with asyncio.timeout(POLL_S + 2):  # a rebalance blocks it
                got = await consumer.getmany(timeout_ms=int(POLL_S * 1000), max_records=500)
        except TimeoutError:
            return []
        except OffsetOutOfRangeError as error:
            # The next attempt ends what was deleted (`_end_lost`).
            raise Lost(f"{self._topic} no longer holds {error.args[0]}") from error
        for tp in consumer.assignment():
            state = self._open.get(tp.partition)
            high = consumer.highwater(tp)
            if state is not None and high is not None and state.position > high:
                raise Lost(f"{self._topic}[{tp.partition}]: the parts end at {state.position}, "
                           f"beyond the log's end {high}: it is another log")
        return [record for records in got.values() for record in records]

    # -- decisions -----------------------------------------------------------------------------

    async def _open_up(
        self, partitions: Iterable[int], writer: Writer, ledger: LedgerReader
    ) -> None:
        """Read what the parts hold and the ledger lacks; from then on the partitions are ours."""
        fresh: list[Ended] = []
        for partition in partitions:
            fresh += await self._files(lambda p=partition: self._read_parts(p))
        books = await ledger.catch_up(READ_TIMEOUT_S)
        missing = [
            end for end in fresh
            if not books.ended(self._leaf, end.n)
            and not (
                end.outcome is Outcome.PARKED
                and books.set_aside(self._leaf, end.n, end.redrives)
            )
        ]
        await self._to_ledger(writer, missing)
        for partition in partitions:
            kept = self._kept[partition]
            seen = Seen(self._partitions, kept.seen.state())
            self._open[partition] = _Open(Decider(seen, min_score=self._min_score), kept.end)
        await self._end_lost(partitions)

    async def _end_lost(self, partitions: Iterable[int]) -> None:
        """End what was deleted before it was read; the chain of parts goes on over the gap."""
        opened = {p: self._open[p] for p in partitions}
        positions = {p: state.position for p, state in opened.items()}
        short, beyond = await deleted_unread(self._context, positions)
        if beyond:
            raise Lost(f"{self._topic}: the parts of {sorted(beyond)} go beyond the log's end: it "
                       "is another log")
        if not short:
            return
        lost = await find_lost(
            self._context, short, lambda u: opened[u.n % self._partitions].decider.knows(u.n)
        )
        for partition, first in short.items():
            opened[partition].skip_to(first, [one.unit.n for one in lost[partition]])

    def _read_parts(self, partition: int) -> list[Ended]:
        """Ends in parts that were not read before, and in earlier logs' at the first time."""
        kept, found = self._kept[partition], []
        self._folder.take_over(partition)
        if kept.end == 0:
            for n, line in self._restored.items():
                if n % self._partitions == partition:
                    kept.add(n, line.outcome, line.redrives)
                    found.append(line.ended(self._leaf))
        for part in self._folder.chain(partition, kept.end):
            for line in read_lines(part, Line):
                kept.add(line.n, line.outcome, line.redrives)
                found.append(line.ended(self._leaf))
            kept.end = part.header.end
        return found

    async def _take(self, record: ConsumerRecord) -> None:
        state = self._open.get(record.partition)
        if state is None or record.offset < state.position:
            return
        decision = await self._intake.decide(state.decider, record)
        state.take(record, decision, time.monotonic())
        self._context.progress.open_groups = sum(len(o.buffer) for o in self._open.values())

    # -- part, ledger, commit ------------------------------------------------------------------

    async def _flush_due(self, writer: Writer, consumer: AIOKafkaConsumer | None = None) -> None:
        now_s = time.monotonic()
        for partition in [p for p, state in self._open.items() if state.due(now_s)]:
            await self._flush(partition, writer, consumer)

    async def _flush_all(self, writer: Writer, consumer: AIOKafkaConsumer | None = None) -> None:
        for partition in [p for p, state in self._open.items() if state.buffer]:
            await self._flush(partition, writer, consumer)

    async def _flush(
        self, partition: int, writer: Writer, consumer: AIOKafkaConsumer | None
    ) -> None:
        state = self._open.get(partition)
        if state is None:
            return
        decisions, state.buffer = state.buffer, []
        start_offset, end = state.start, state.position
        state.start = end
        await self._files(
            lambda: self._folder.write(partition, start_offset, end, decisions)
        )
        await self._to_ledger(writer, [d.ended(self._leaf) for d in decisions])
        kept = self._kept[partition]
        for decision in decisions:
            kept.add(decision.n, decision.outcome, decision.redrives)
        kept.end = end
        progress = self._context.progress
        progress.done += len(decisions)
        progress.last_progress_s = time.time()
        progress.open_groups = sum(len(o.buffer) for o in self._open.values())
        if consumer is not None:
            await self._commit(consumer, partition, end)

    async def _to_ledger(self, writer: Writer, ends: list[Ended]) -> None:
        await write_ends(self._context, writer, ends)

    async def _commit(self, consumer: AIOKafkaConsumer, partition: int, offset: int) -> None:
        """For people who look at the lag: the parts are the truth, so that a failure is no harm."""
        tp = TopicPartition(self._topic, partition)
        with contextlib.suppress(KafkaError, TimeoutError):
            await asyncio.wait_for(
                consumer.commit({tp: OffsetAndMetadata(offset, "")}), COMMIT_TIMEOUT_S
            )


class _Listener(ConsumerRebalanceListener):
    """Stops partitions before their first read, and lets go of them at once."""

    def __init__(
        self, context: RunContext, consumer: AIOKafkaConsumer, assigned: set[int],
        opened: dict[int, _Open],
    ) -> None:
        self._context = context
        self._consumer = consumer
        self._assigned = assigned
        self._opened = opened

    def on_partitions_revoked(self, revoked: Any) -> None:
        self._assigned.clear()
        self._opened.clear()

    def on_partitions_assigned(self, assigned: Any) -> None:
        self._context.bus.rejoins.joined(self._context.group, time.monotonic())
        tps = list(assigned)
        if not tps:
            return
        # A position before anything is awaited: otherwise aiokafka asks for a committed one.
        self._consumer.pause(*tps)
        for tp in tps:
            self._consumer.seek(tp, 0)
        self._assigned.update(tp.partition for tp in tps)
