"""The active producer of one run: finds its place in the log, then admits group after group.

`issued` is acknowledged before the group's prompts, and one group is open per partition, so that
after any crash exactly the last group of a partition can be incomplete (`delivery.md` 10, 11).
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import structlog

from rollstream.shared.blobs import Blobs, StoreUnreachable
from rollstream.shared.brokers.room import BrokerRoom
from rollstream.shared.bus import Lost, TooLarge, Writer
from rollstream.shared.codec import Undecodable, decode, header_int
from rollstream.shared.control import Finished, PolicyVersion
from rollstream.shared.ledger import Ledger
from rollstream.shared.ledger_reader import LedgerReader
from rollstream.shared.log_reader import LogReader
from rollstream.shared.output_tail import last_records
from rollstream.shared.records import Failure, Issued, Prompt, Row
from rollstream.shared.redrive import opened_again
from rollstream.shared.role import Active
from rollstream.shared.runs import RunState, Status, state_key
from rollstream.shared.service import RunContext
from rollstream.shared.step import Blocked
from rollstream.shared.topics import runs_topic

from .admission import over, room, standing
from .done_rows import row_hash
from .expiry import ExpiryWatch
from .plan import Plan, last_group, request_seed
from .running import Running
from .sources import Source

CATCH_UP_S = 600.0
NEWS_S = 0.25
FINISH_S = 600.0
"""How long the sinks may take to write their final files."""


class Production:
    """One term of office of a run's producer."""

    def __init__(
        self, context: RunContext, sources: list[Source], active: Active, broker: BrokerRoom
    ) -> None:
        run = context.run
        self._context = context
        self._sources = sources
        self._broker = broker
        self._blobs = Blobs(run)
        self._writer: Writer = active.writer
        self._active = active
        self._plan = Plan(
            [len(source.rows) for source in sources],
            [source.weight for source in run.environments], run.shuffle_seed,
        )
        self._rows_end = last_group(run, self._plan)
        self._version = 0
        self._finished: dict[str, int] = {}
        """Of each leaf, how many groups had ended when it wrote its final files."""
        self._log = structlog.get_logger().bind(run=run.run, stage=context.route.instance)

    async def run(self) -> None:
        """Admit until the run is over or the process drains. Raises Lost."""
        context = self._context
        async with (
            LedgerReader(context.bus, context.run) as ledger,
            self._active.control() as control,
            Running(context) as running,
            ExpiryWatch(context) as expiry,
        ):
            books = await ledger.catch_up(CATCH_UP_S)
            async for records in control.to_end(CATCH_UP_S):
                self._hear(records)
            await self._restore(books)
            await self._complete(books)
            context.progress.state = "working"
            if context.status is Status.FINISHING and await self._end(
                ledger, control, context.reason or "finished"
            ):
                return
            while not context.ending:
                # Groups of an earlier log were issued again and are never generated again.
                generated = await running.finished_samples()
                generated += books.restored * context.run.group_size
                now = standing(books.books(), generated)
                expiry.look(books)
                context.progress.done = now.issued
                context.progress.alive()
                stopped = context.status is Status.STOPPED
                if (reason := over(context.run, now, self._rows_end, stopped=stopped)) is not None:
                    if await self._end(ledger, control, reason):
                        return
                    continue
                groups = self._room_at_broker(room(context.run, now, self._rows_end))
                if groups and context.status is Status.RUNNING:
                    await self._admit(books, groups)
                await ledger.follow(NEWS_S)
                self._hear(await control.more(0.01))

    def _room_at_broker(self, groups: int) -> int:
        """None where the broker's memory is nearly full; said once, and shown."""
        progress, full = self._context.progress, self._broker.why_full() if groups else None
        if full is not None and not progress.waiting_for:
            self._log.error(full)
        progress.waiting_for = full or ""
        return 0 if full else groups

    async def _admit(self, books: Ledger, groups: int) -> None:
        """Issue the next groups, at most one per partition at a time."""
        first = books.next_n
        numbers = [*books.missing, *range(first, first + groups)][:groups]
        partitions = self._context.run.partitions
        lines: dict[int, list[int]] = {}
        for n in sorted(numbers):
            lines.setdefault(n % partitions, []).append(n)

        async def issue(line: list[int]) -> None:
            # One after the other: after a crash only a partition's last group can be incomplete.
            for n in line:
                await self._issue(books, n)

        # waits: each send has a deadline
        await asyncio.gather(*(issue(line) for line in lines.values()))
        self._context.progress.last_progress_s = time.time()

    async def _issue(self, books: Ledger, n: int) -> None:
        run = self._context.run
        place = self._plan.place(n)
        source = self._sources[place.source]
        issued = Issued(
            n=n, k=run.group_size, env=source.ref.id, row_index=place.row_index,
            epoch=place.epoch, row_hash=row_hash(source.rows[place.row_index]),
        )
        partition = n % run.partitions
        await self._writer.send(self._context.topic("ledger"), partition, issued,
                                key=f"{run.run}/{n}")
        books.apply(partition, issued, time.time())
        await self._prompts(n, 0)

    async def _prompts(self, n: int, first_i: int) -> None:
        """The group's prompts from i on, in order, each acknowledged."""
        run = self._context.run
        place = self._plan.place(n)
        source = self._sources[place.source]
        row = source.rows[place.row_index]
        overrides = row.info.get("group_overrides")
        for i in range(first_i, run.group_size):
            prompt = Prompt(
                run=run.run, pipeline=run.pipeline, n=n, i=i, k=run.group_size,
                epoch=place.epoch, row_index=place.row_index, env=source.ref, row=row,
                seed=request_seed(run.seed, n, i), issued_version=self._version,
                group_overrides=overrides if isinstance(overrides, dict) else {},
            )
            await self._send(prompt)

    async def _send(self, prompt: Prompt) -> None:
        """A row that no topic takes goes on without its content: its sample ends as too_large."""
        topic = self._context.topic(self._context.route.output or "")
        partition, key = prompt.n % self._context.run.partitions, f"{prompt.run}/{prompt.n}"
        try:
            await self._blobs.send(self._writer, topic, partition, prompt, key=key)
        except StoreUnreachable as error:
            raise Blocked(str(error)) from error
        except TooLarge as error:
            reason = f"{error}; give the run a store (--blobs.uri)"
            slot = msgspec.structs.replace(
                prompt, row=Row(prompt=[]), failure=Failure("too_large", reason)
            )
            await self._writer.send(topic, partition, slot, key=key)

    async def _restore(self, books: Ledger) -> None:
        """Groups that ended in an earlier log of the run exist again, without any prompt."""
        run = self._context.run
        for first, last in run.restored:
            for n in range(first, last + 1):
                if books.issued(n):
                    continue
                issued = Issued(n=n, k=run.group_size, restored=True)
                partition = n % run.partitions
                await self._writer.send(
                    self._context.topic("ledger"), partition, issued, key=f"{run.run}/{n}"
                )
                books.apply(partition, issued)

    async def _complete(self, books: Ledger) -> None:
        """Write the prompts that a producer before us issued and did not get to (rule 11)."""
        run = self._context.run
        topic = self._context.topic(self._context.route.output or "")
        newest: dict[int, tuple[int, int]] = {}
        tails = await last_records(
            self._context.bus, topic, run.partitions, 4 * run.group_size
        )
        for partition, records in tails.items():
            for record in records:
                headers = list(record.headers)
                n, i = header_int(headers, "rs-group"), header_int(headers, "rs-sample")
                if n is not None and i is not None:
                    newest[partition] = max(newest.get(partition, (-1, -1)), (n, i))
        leaves = [leaf.leaf for leaf in books.books()]
        for partition, n in enumerate(books.issued_max):
            # What was parked had all its prompts, though they may have expired since.
            written = n >= 0 and all(
                books.ended(leaf, n) or books.set_aside(leaf, n, 0) for leaf in leaves
            )
            if n < 0 or written or _within(n, run.restored):
                continue
            last_n, last_i = newest.get(partition, (-1, -1))
            if last_n > n:
                raise Lost(f"{topic}-{partition} holds group {last_n}, the ledger ends at {n}")
            first_i = last_i + 1 if last_n == n else 0
            if first_i < run.group_size:
                self._log.info("completing a group", n=n, first_i=first_i)
                await self._prompts(n, first_i)

    def _hear(self, records: list[Any]) -> None:
        """Follow the policy version that the trainer announces."""
        for record in records:
            try:
                said = decode(record.value, list(record.headers))
            except Undecodable:
                continue
            if isinstance(said, PolicyVersion):
                self._version = said.version
            elif isinstance(said, Finished):
                self._finished[said.leaf] = max(said.ended, self._finished.get(said.leaf, -1))

    async def _end(self, ledger: LedgerReader, control: LogReader, reason: str) -> bool:
        """Have the sinks write their final files, then call the run done; whether it is.

        A redrive may come at any moment. It writes the ledger first and looks at the run's state
        afterwards; here `done` is written first and the ledger read afterwards: so one of the two
        sees the other, and opens the run again.
        """
        for leaf in ledger.books.books():
            self._log.info("run over", reason=reason, **leaf._asdict())
        await self._say(Status.FINISHING, reason)
        deadline_s = time.monotonic() + FINISH_S
        while not self._context.draining.is_set() and (missing := self._unfinished(ledger.books)):
            self._hear(await control.more(NEWS_S))
            await ledger.follow(0.01)
            if await self._opened_again(ledger.books, reason):
                return False
            self._context.progress.alive()
            if time.monotonic() > deadline_s:
                silent = ", ".join(missing)
                reason = f"{reason}; no word of the final files from {silent}"
                self._log.error("sinks did not finish", leaves=silent)
                break
        if self._context.draining.is_set():
            return False
        ended = [leaf.ended for leaf in ledger.books.books()]
        await self._say(Status.DONE, reason)
        books = await ledger.catch_up(CATCH_UP_S)
        if await self._opened_again(books, reason):
            return False
        return ended == [leaf.ended for leaf in books.books()]

    def _unfinished(self, books: Ledger) -> list[str]:
        """The leaves whose final files lack groups that have ended.

        A run that was opened again for a redrive has finished before, with fewer groups.
        """
        return [
            leaf.leaf for leaf in books.books() if self._finished.get(leaf.leaf, -1) < leaf.ended
        ]

    async def _opened_again(self, books: Ledger, reason: str) -> bool:
        """Whether groups were put back since the run was over: then it goes on for them."""
        if not any(leaf.in_flight for leaf in books.books()):
            return False
        await self._say(*opened_again(reason))
        return True

    async def _say(self, status: Status, reason: str) -> None:
        run = self._context.run
        state = RunState(status=status, reason=reason, changed_s=time.time())
        await self._writer.send_bytes(
            runs_topic(run.prefix), 0, state_key(run.run), msgspec.json.encode(state)
        )


def _within(n: int, ranges: list[tuple[int, int]]) -> bool:
    return any(first <= n <= last for first, last in ranges)


async def produce(
    context: RunContext, sources: list[Source], active: Active, broker: BrokerRoom
) -> None:
    """Hold a run's office of producer until it is over."""
    await Production(context, sources, active, broker).run()


