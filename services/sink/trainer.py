"""The trainer leaf at work: from the log into batches, offered, acknowledged, and into the ledger.

One process is active (`shared/role.py`). It reads all partitions, commits nothing, and finds its
place in ledger and control topic. Order of writing: `offered` before a batch leaves, `acked` before
the ledger's delivered (`delivery.md` rule 19).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

import structlog
from aiokafka import ConsumerRecord

from rollstream.services.sink import batch_file
from rollstream.services.sink.batch_file import BatchLine
from rollstream.services.sink.batches import BatchBook, Pool
from rollstream.services.sink.decide import Decider, Decision
from rollstream.services.sink.ends import write_ends
from rollstream.services.sink.intake import Intake
from rollstream.services.sink.trajectories import is_trainable
from rollstream.shared.bus import Lost
from rollstream.shared.codec import Undecodable, decode
from rollstream.shared.control import Acked, Finished, Offered, PolicyVersion
from rollstream.shared.ledger_reader import read_ledger
from rollstream.shared.log_reader import LogReader
from rollstream.shared.policy import Policy
from rollstream.shared.records import Ended, Group, Outcome
from rollstream.shared.retention import find_lost
from rollstream.shared.role import Active
from rollstream.shared.runs import Status
from rollstream.shared.service import RunContext

POLL_S = 0.2
READ_TIMEOUT_S = 600.0
CONTROL_TIMEOUT_S = 30.0

T = TypeVar("T")
log = structlog.get_logger("rollstream.sink")


class Batch(NamedTuple):
    """A batch on its way to the trainer."""

    id: int
    version: int
    groups: list[Group]
    redelivered: bool = False


class TrainerLeaf:
    """The active trainer sink of one run, for one attempt; `work` is all of it.

    Meanwhile the API calls `register`, `next_batch`, `acknowledge`, holding `lock`.
    """

    def __init__(self, context: RunContext, active: Active) -> None:
        run, route = context.run, context.route
        assert route.input is not None
        assert route.leaf is not None
        self.run = run
        self._context = context
        self._active = active
        self._leaf = route.leaf
        self._topic = context.topic(route.input)
        self.pool = Pool(run.batch_size, run.max_staleness)
        self.policy = Policy()
        self.book = BatchBook()
        self.open_batch: Batch | None = None
        """Offered and not acknowledged."""
        self.handed_out = -1
        """The id of the batch that was last written to a trainer in this life of the sink."""
        self.lock = asyncio.Lock()
        """One request about batches at a time."""
        self._failure: Lost | None = None
        self._in_office = False
        """The control topic was read to its end: whatever is offered from now on is ours."""
        self._offering: int | None = None
        self.latest: Group | None = None
        self._earlier_batches = 0
        self._deciders: list[Decider] = []
        self._ends: list[Ended] = []
        self._control_position = 0
        self._control_moved = asyncio.Event()
        self._intake = Intake(run, self._topic, context.progress)
        self._file = Path(run.sink.out) / "batches.jsonl" if run.sink.out else None

    # -- taking over ---------------------------------------------------------------------------

    async def work(self, serve: Callable[[], Awaitable[None]]) -> None:
        """Find the place in the log, call `serve` to open the API, and read until the run ends.

        Returns when the process drains or the run is done. Raises Lost.
        """
        async with self._active.control() as control, LogReader(
            self._context.bus, self._topic, range(self.run.partitions)
        ) as data:
            async for records in control.to_end(READ_TIMEOUT_S):
                self._apply_control(records, control)
            self._in_office = True
            follower = asyncio.create_task(self._follow(control))
            worker = asyncio.create_task(self._take_over_and_read(data, serve))
            try:
                # waits: for as long as the role is ours and the run goes on
                await asyncio.wait({follower, worker}, return_when=asyncio.FIRST_COMPLETED)
                for task in (follower, worker):
                    if task.done():
                        task.result()
            finally:
                for task in (follower, worker):
                    task.cancel()
                await asyncio.wait({follower, worker}, timeout=POLL_S + CONTROL_TIMEOUT_S)

    async def _take_over_and_read(
        self, data: LogReader, serve: Callable[[], Awaitable[None]]
    ) -> None:
        delivered = await self._start_from_ledger()
        await data.rewind()
        kept_from = {p: first for p, first in data.position.items() if first > 0}
        async for records in data.to_end(READ_TIMEOUT_S):
            await self._take(records)
        await self._settle_acknowledged(delivered)
        await self._reopen()
        if kept_from:
            await self._end_lost(kept_from)
        await serve()
        await self._read(data)

    async def _start_from_ledger(self) -> dict[int, Ended]:
        """Seen from the ledger; the groups whose delivery the ledger does not hold yet, by n."""
        books = await read_ledger(self._context.bus, self.run, READ_TIMEOUT_S)
        self._deciders = [Decider(seen) for seen in books.ended_groups(self._leaf)]
        lines = await asyncio.to_thread(batch_file.read, self._file) if self._file else []
        self._earlier_batches = batch_file.batches_before(lines, self.run.log_id)
        for line in lines:
            if (line.kind, line.log_id) == ("acked", self.run.log_id):
                open_ids = {offered.batch_id for offered in self.book.unacknowledged()}
                if line.batch_id in open_ids:
                    await self._told(Acked(batch_id=line.batch_id))
        ends = batch_file.delivered_before(lines, self.run.log_id)
        for end in ends:
            self._deciders[end.n % self.run.partitions].seen.add_group(end.n)
        await self._to_ledger(end for end in ends if not books.ended(self._leaf, end.n))
        if lines and not self.book.registered:
            await self._announce(self._earlier_batches)
        return {
            n: Ended(n=n, leaf=self._leaf, outcome=Outcome.DELIVERED)
            for id, placed in self.book.batches.items() if id in self.book.acked
            for n in placed.offered.groups if not books.ended(self._leaf, n)
        }

    async def _settle_acknowledged(self, delivered: dict[int, Ended]) -> None:
        """The last owner died between `acked` and the ledger."""
        for n, bare in delivered.items():
            group = self.pool.release(n)
            end = self._end_of(group, Outcome.DELIVERED) if group else bare
            self._deciders[n % self.run.partitions].seen.add_group(n)
            self._ends.append(end)
        await self._write_ends()

    async def _reopen(self) -> None:
        """The batch that was offered last is offered again, whole.

        Where the log no longer holds one of its groups the batch is void.
        """
        for offered in self.book.unacknowledged():
            groups = self.pool.reserve(offered.groups)
            if groups is not None and self.open_batch is None:
                self.open_batch = Batch(offered.batch_id, offered.version, groups, True)
                if not self.book.announced and self.book.version <= offered.version:
                    await self._announce(offered.version + 1)
            else:
                log.error("an offered batch can't be offered again: the log lacks its groups",
                          run=self.run.run, batch=offered.batch_id, groups=offered.groups)

    async def _end_lost(self, kept_from: dict[int, int]) -> None:
        """Drop what was deleted before it was read (rule 24)."""
        deciders = self._deciders
        lost = await find_lost(
            self._context, kept_from, lambda u: deciders[u.n % self.run.partitions].knows(u.n)
        )
        numbers = sorted(one.unit.n for found in lost.values() for one in found)
        if numbers:
            log.error("groups were deleted before they were read: dropped", run=self.run.run,
                      lost=len(numbers), first_n=numbers[0])
        for n in numbers:
            if (decision := deciders[n % self.run.partitions].decide_lost(n)) is not None:
                self._ends.append(decision.ended(self._leaf))
        await self._write_ends()

    # -- reading -------------------------------------------------------------------------------

    async def _read(self, data: LogReader) -> None:
        context, told_at = self._context, -1
        while not context.ending:
            # Again where more has ended since: a redrive may have opened the run in between.
            if context.status is Status.FINISHING and told_at != context.progress.done:
                told_at = context.progress.done
                books = await read_ledger(context.bus, self.run, READ_TIMEOUT_S)
                ended = next(b.ended for b in books.books() if b.leaf == self._leaf)
                await self._told(Finished(leaf=self._leaf, ended=ended))
            context.progress.alive()
            context.progress.state = "serving" if self.book.registered else "waiting for a trainer"
            await self._take(await data.more(POLL_S))
            if self._failure is not None:
                raise self._failure
            if context.status is Status.STOPPED:
                # waits: whoever holds it waits for writes that have deadlines
                async with self.lock:
                    await self._cancel_all()
            elif self.offered_all:
                await self._drop(self.pool.take_all(), "not_needed")

    async def _take(self, records: list[ConsumerRecord]) -> None:
        for record in records:
            decider = self._deciders[record.partition]
            decision = await self._intake.decide(decider, record)
            if decision is None:
                continue
            if decision.outcome is Outcome.DELIVERED and decision.group is not None:
                if is_trainable(decision.group):
                    self.pool.add(decision.group)
                    self.latest = decision.group
                    continue
                decision = Decision(decision.n, Outcome.DROPPED, "no_tokens", decision.group)
            self._ends.append(decision.ended(self._leaf))
        self._context.progress.open_groups = len(self.pool)
        await self._write_ends()

    def _apply_control(self, records: list[ConsumerRecord], control: LogReader) -> None:
        for raw in records:
            try:
                record = decode(raw.value, list(raw.headers))
            except Undecodable as error:
                log.error("undecodable control record", error=str(error), offset=raw.offset)
                continue
            self.book.apply(raw.offset, record)
            self.policy.apply(record)
            if isinstance(record, Offered) and self._in_office and (
                record.batch_id != self._offering
            ):
                self.fail(Lost(f"batch {record.batch_id} was offered by another sink: the role is "
                               "not ours any more"))
        self._control_position = control.position[0]
        self._control_moved.set()

    async def _follow(self, control: LogReader) -> None:
        while True:
            self._apply_control(await control.more(POLL_S), control)

    # -- what the trainer does -----------------------------------------------------------------

    @property
    def offered_all(self) -> bool:
        """Whether `total_steps` batches were offered: there is no further one."""
        total = self.run.total_steps
        return total is not None and self._earlier_batches + len(self.book.batches) >= total

    @property
    def finished(self) -> bool:
        """Whether nothing will be handed out any more."""
        over = self.offered_all or self._context.status in (
            Status.STOPPED, Status.FINISHING, Status.DONE
        )
        return over and self.open_batch is None

    async def register(self, starting_step: int) -> None:
        """A trainer is there. Its step is the first version, unless the run is past that."""
        if not self.book.announced:
            await self._announce(max(self.book.version, starting_step))

    async def next_batch(self) -> Batch | None:
        """Offer the next batch, None where there is not enough for one.

        Raises Lost where the role turns out to be another's.
        """
        await self._drop(self.pool.take_stale(self.book.version), "stale")
        if self.offered_all or self._context.status is Status.STOPPED:
            return None
        groups = self.pool.reserve_next()
        if groups is None:
            return None
        id, version = max(self.book.next_id, self._earlier_batches), self.book.version
        ends = [self._end_of(group, Outcome.DELIVERED) for group in groups]
        await self._to_file(BatchLine(
            log_id=self.run.log_id, batch_id=id, kind="offered", ends=ends
        ))
        self._offering = id
        offset = await self._to_control(
            Offered(batch_id=id, groups=[group.n for group in groups], version=version)
        )
        self._offering = None
        if self._failure is not None:
            raise self._failure
        if self.book.batches[id].offset != offset:
            raise Lost(f"batch {id} was offered by another sink: the role is not ours any more")
        self.open_batch = Batch(id, version, groups)
        if not self.book.announced:
            await self._announce(version + 1)
        return self.open_batch

    async def acknowledge(self) -> None:
        """The trainer has the open batch: its groups are delivered."""
        batch = self.open_batch
        if batch is None:
            return
        await self._to_file(
            BatchLine(log_id=self.run.log_id, batch_id=batch.id, kind="acked")
        )
        await self._told(Acked(batch_id=batch.id))
        self.open_batch = None
        for group in batch.groups:
            self.pool.release(group.n)
            self._ends.append(self._end_of(group, Outcome.DELIVERED))
        await self._write_ends()

    def fail(self, error: Lost) -> None:
        """A request found out that this attempt is over."""
        self._failure = self._failure or error

    async def announce(self, version: int, weights: str) -> None:
        """The trainer says which version its weights are; a lower one starts a new epoch."""
        epoch = self.policy.next_epoch(version)
        await self._to_control(PolicyVersion(version=version, epoch=epoch, weights=weights))

    # -- writing -------------------------------------------------------------------------------

    async def _cancel_all(self) -> None:
        """The run was stopped: what waits is cancelled, what was handed out was delivered."""
        await self._drop(self.pool.take_all(), "cancelled")
        batch = self.open_batch
        if batch is None:
            return
        if self.handed_out == batch.id:
            await self.acknowledge()
        else:
            self.open_batch = None
            await self._drop(batch.groups, "cancelled")

    async def _drop(self, groups: list[Group], reason: str) -> None:
        for group in groups:
            self.pool.release(group.n)
            self._ends.append(self._end_of(group, Outcome.DROPPED, reason))
        await self._write_ends()

    def _end_of(self, group: Group, outcome: Outcome, reason: str = "") -> Ended:
        return Decision(group.n, outcome, reason, group).ended(self._leaf)

    async def _write_ends(self) -> None:
        ends, self._ends = self._ends, []
        if not ends:
            return
        await self._to_ledger(ends)
        progress = self._context.progress
        progress.done += len(ends)
        progress.last_progress_s = time.time()
        progress.open_groups = len(self.pool)

    async def _to_ledger(self, ends: Iterable[Ended]) -> None:
        await write_ends(self._context, self._active.writer, ends)

    async def _announce(self, version: int) -> None:
        await self._told(PolicyVersion(version=version, epoch=self.book.epoch, implied=True))

    async def _told(self, record: Acked | Finished | PolicyVersion) -> None:
        """Write to the control topic what changes nothing when it is read back later."""
        offset = await self._active.writer.send(self._active.control_topic, 0, record)
        self.book.apply(offset, record)

    async def _to_control(self, record: Offered | PolicyVersion) -> int:
        """Write to the control topic and wait until it was read back: its place in the order."""
        offset = await self._active.writer.send(self._active.control_topic, 0, record)
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                while self._control_position <= offset:
                    self._control_moved.clear()
                    await self._control_moved.wait()
        except TimeoutError as error:
            raise Lost(f"{self._active.control_topic} was not read back in time") from error
        return offset

    async def _to_file(self, line: BatchLine) -> None:
        if self._file is not None:
            await asyncio.to_thread(batch_file.append, self._file, line)
