"""Single-active: of all processes that offer to do a run's one-at-a-time work, one does it.

The role is a partition: whoever owns the run's `control` partition in the stage instance's consumer
group is active, the others stand by. Kafka's group protocol is the election; nothing is committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from rollstream.shared.bus import Bus, ConsumerRebalanceListener, Lost, Writer, start, stop
from rollstream.shared.log_reader import LogReader
from rollstream.shared.runs import Status
from rollstream.shared.service import RunContext

STEP_DOWN_S = 5.0
POLL_MS = 200
REBALANCE_POLL_S = 2.0


class Active:
    """What the active one works with: a writer, and the run's control topic to read."""

    def __init__(self, bus: Bus, writer: Writer, control_topic: str) -> None:
        self._bus = bus
        self.writer = writer
        self.control_topic = control_topic

    def control(self) -> LogReader:
        """A reader of the control topic from its first record on; an async context manager.

        `to_end` gives all that was acknowledged before, `more` what comes later.
        """
        return LogReader(self._bus, self.control_topic, [0])


async def run_active(
    context: RunContext, active: Callable[[Active], Awaitable[None]], *, office: str = ""
) -> None:
    """Call `active` whenever this process owns the role, until it returns.

    Standing by shows as `context.progress.state = "standby"`. When the role is lost, `active` is
    cancelled at once, inside the rebalance, before another member can be given the role; it must
    not outlive its cancellation by more than seconds. Each rebalance costs the owner its role for a
    moment, so `active` has to find its place again from the log. Returns as well when the run is
    over or the process drains while it stands by. `office` names a role beside the instance's own
    work. Raises what `active` raises, and Lost where the
    broker can't be reached.
    """
    group = f"{context.group}.{office}" if office else context.group
    consumer = context.bus.member(group)
    writer = await _writer(context.bus)
    post = _Post(context, active, consumer, Active(context.bus, writer, context.topic("control")))
    try:
        consumer.subscribe([context.topic("control")], listener=post)
        await start(consumer)
        await post.attend()
    except (KafkaError, TimeoutError) as error:
        raise Lost.because(f"the role of {group}", error) from error
    finally:
        await post.step_down()
        await stop(consumer)
        await writer.close()


async def _writer(bus: Bus) -> Writer:
    try:
        return await bus.writer()
    except (KafkaError, TimeoutError) as error:
        raise Lost.because("could not reach the broker", error) from error


class _Post(ConsumerRebalanceListener):
    """The place that one member holds: the work runs as a task while it is ours."""

    def __init__(
        self, context: RunContext, active: Callable[[Active], Awaitable[None]],
        consumer: AIOKafkaConsumer, tools: Active,
    ) -> None:
        self._context = context
        self._active = active
        self._consumer = consumer
        self._tools = tools
        self._task: asyncio.Task[None] | None = None
        context.progress.state = "standby"

    def on_partitions_assigned(self, assigned: Any) -> None:
        self._context.bus.rejoins.joined(self._context.group, time.monotonic())
        mine = [tp for tp in assigned if isinstance(tp, TopicPartition)]
        if not mine:
            return
        # Owned, never read here: a position at once, or aiokafka looks for a committed one.
        self._consumer.pause(*mine)
        for tp in mine:
            self._consumer.seek(tp, 0)
        self._task = asyncio.ensure_future(self._active(self._tools))

    async def on_partitions_revoked(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, revoked: Any
    ) -> None:
        await self.step_down()

    async def step_down(self) -> None:
        """Cancel the work and wait, not for long, until it has stopped."""
        task, self._task = self._task, None
        if task is None:
            return
        self._context.progress.state = "standby"
        task.cancel()
        await asyncio.wait({task}, timeout=STEP_DOWN_S)
        if task.done() and not task.cancelled():
            # Losing the role is the news; what the work died of on the way is not.
            task.exception()

    async def attend(self) -> None:
        context = self._context
        while True:
            if self._task is not None and self._task.done():
                task, self._task = self._task, None
                return task.result()
            if self._task is None and (
                context.draining.is_set() or context.status is Status.DONE
            ):
                return None
            # Nothing is read; errors of the group come up here.
            with contextlib.suppress(TimeoutError):  # it waits for the end of a rebalance
                async with asyncio.timeout(REBALANCE_POLL_S):
                    await self._consumer.getmany(timeout_ms=POLL_MS)
