"""The forms of a step: what a service does to records, without offsets, topics or other services.

    each    record -> record             one Prompt to one Rollout, one Scored to one Distilled
    batch   records -> records           the same, many at once, in the same order
    group   a group, its k Rollouts as unscored samples -> one Scored

No input ends without an output: a drop is a record too. A step returns what the model or its data
did as a record; it raises only for faults of the machinery. `perform` retries those, and says in
the end what the loop has to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rollstream.shared.records import Failure

Each = Callable[[Any], Awaitable[msgspec.Struct]]
Batch = Callable[[list[Any]], Awaitable[Sequence[msgspec.Struct]]]


class Blocked(Exception):
    """Nothing is wrong with the input, but it can't be worked on now (e.g. 401 from a server).

    The run's loop ends its attempt with this message and starts again later; the input stays
    uncommitted and nothing goes to the dead letters.
    """


class PausesRun(Blocked):
    """Whatever the run asks for, the answer is this one: it is paused until somebody has looked."""


@dataclass(frozen=True)
class Step:
    """One form of a step and its limits; exactly one of each, batch and group is given."""

    each: Each | None = None
    batch: Batch | None = None
    group: Each | None = None
    max_in_flight: int = 64
    max_open_bytes: int = 512 * 1024 * 1024
    """What incomplete groups may hold in memory; above it their bodies are left in the log."""
    deadline_s: float = 60.0
    """For one attempt."""
    max_attempts: int = 3
    retry_pause_s: float = 0.5
    max_batch: int = 32
    max_wait_ms: int = 20

    def __post_init__(self) -> None:
        if sum(form is not None for form in (self.each, self.batch, self.group)) != 1:
            raise ValueError("a Step has exactly one of each, batch and group")

    @property
    def groups(self) -> bool:
        return self.group is not None


async def perform(call: Each, given: Any, step: Step) -> msgspec.Struct | Failure:
    """The step's output, or the failure of its last attempt.

    Raises Blocked, and what is no Exception (cancellation).
    """
    failure = Failure("none", "no attempt was made")
    for attempt in range(step.max_attempts):
        if attempt:
            await asyncio.sleep(step.retry_pause_s * 2 ** (attempt - 1))
        try:
            return await asyncio.wait_for(call(given), step.deadline_s)
        except Blocked:
            raise
        except TimeoutError:
            failure = Failure("timeout", f"took longer than {step.deadline_s:g} s")
        except Exception as error:
            failure = Failure(type(error).__name__, str(error))
    return failure


class Batcher:
    """Makes a `batch` step look like an `each` step: gathers calls for a moment.

    Invariant: each call gets the output at its own input's place, or the batch's exception.
    """

    def __init__(self, step: Step) -> None:
        if step.batch is None:
            raise ValueError("this Step has no batch form")
        self._batch = step.batch
        self._max = step.max_batch
        self._wait_s = step.max_wait_ms / 1000
        self._waiting: list[tuple[Any, asyncio.Future[msgspec.Struct]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, record: Any) -> msgspec.Struct:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[msgspec.Struct] = loop.create_future()
        self._waiting.append((record, future))
        if len(self._waiting) >= self._max:
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(self._wait_s, self._flush)
        # waits: within the step's deadline
        return await future

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        taken, self._waiting = self._waiting, []
        if taken:
            task = asyncio.get_running_loop().create_task(self._run(taken))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self, taken: list[tuple[Any, asyncio.Future[msgspec.Struct]]]) -> None:
        try:
            outputs = list(await self._batch([record for record, _ in taken]))
            if len(outputs) != len(taken):
                raise ValueError(f"the batch step gave {len(outputs)} records for {len(taken)}")
        except Exception as error:
            for _, future in taken:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), output in zip(taken, outputs, strict=True):
            if not future.done():
                future.set_result(output)
