"""The thread that computes, so that HTTP stays alive meanwhile; and how the others talk to it."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from rollstream.services.engine.scheduler import Scheduler
from rollstream.services.engine.sequences import Sequence

T = TypeVar("T")
PauseMode = Literal["keep", "wait", "abort"]


class Ticket:
    """One request's sequences; `changed` wakes up its handler."""

    def __init__(self, sequences: list[Sequence], *, every_token: bool) -> None:
        self.sequences = sequences
        self.every_token = every_token
        self.changed = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    @property
    def done(self) -> bool:
        """Every sequence has ended."""
        return all(sequence.finish_reason for sequence in self.sequences)

    async def wait(self) -> None:
        """Until every sequence has ended."""
        while not self.done:
            # waits: the executor ends every ticket, and a client that leaves cancels
            await self.changed.wait()
            self.changed.clear()


class Worker:
    """Runs the scheduler's steps in its own thread; commands run between two steps."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.paused = False
        self._admitting = True
        self._held: list[Ticket] = []
        self._tickets: dict[Sequence, Ticket] = {}
        self._commands: deque[Callable[[], object]] = deque()
        self._draining: list[asyncio.Future[None]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float = 5) -> None:
        """Ends the thread after the step it is in."""
        self._stopping = True
        with self._wake:
            self._wake.notify()
        self._thread.join(timeout_s)

    def submit(self, ticket: Ticket) -> None:
        """Queues a request's sequences; held back while paused."""
        self._send(lambda: self._take(ticket))

    def forget(self, request_id: str) -> None:
        """Aborts a request whose client has gone."""
        self._send(lambda: self._abort({request_id}))

    async def abort(self, request_ids: set[str] | None) -> int:
        """Aborts requests, all without names; returns how many there were."""
        return await self.call(lambda: self._abort(request_ids))

    async def pause(self, mode: PauseMode) -> None:
        """Stops sampling: at once (keep), once all in flight have ended (wait), or by abort."""
        drained = asyncio.get_running_loop().create_future()
        await self.call(lambda: self._pause(mode, drained))
        # waits: for what is running: at most max_tokens steps each
        await drained

    async def resume(self) -> None:
        """Goes on where a pause has stopped."""
        await self.call(self._resume)

    async def call(self, action: Callable[[], T]) -> T:
        """Runs `action` in the engine's thread between two steps and returns what it returns."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = action()
            except Exception as error:
                loop.call_soon_threadsafe(_settle, answer, None, error)
            else:
                loop.call_soon_threadsafe(_settle, answer, result, None)

        self._send(run)
        # waits: the executor thread answers every call, its end included
        return await answer

    def _send(self, command: Callable[[], object]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._stopping or self._commands or self._has_work()):
                    self._wake.wait()
            if self._stopping:
                return
            while self._commands:
                self._commands.popleft()()
            if self._has_work():
                self._step()
            if self._draining and self.scheduler.idle:
                self._drained()

    def _has_work(self) -> bool:
        return not self.paused and not self.scheduler.idle

    def _step(self) -> None:
        try:
            changed = self.scheduler.step()
        except Exception:
            traceback.print_exc()
            changed = self.scheduler.fail()
        self._tell(changed)

    def _tell(self, changed: list[Sequence]) -> None:
        """Wakes the handlers of requests that have ended or want every token."""
        tickets: dict[Ticket, None] = {}
        for sequence in changed:
            ticket = self._tickets[sequence]
            if sequence.finish_reason:
                del self._tickets[sequence]
            if ticket.every_token or ticket.done:
                tickets[ticket] = None
        for ticket in tickets:
            ticket.loop.call_soon_threadsafe(ticket.changed.set)

    def _take(self, ticket: Ticket) -> None:
        if not self._admitting:
            self._held.append(ticket)
            return
        for sequence in ticket.sequences:
            self._tickets[sequence] = ticket
            self.scheduler.add(sequence)

    def _abort(self, request_ids: set[str] | None) -> int:
        for ticket in self._held:
            if request_ids is None or ticket.sequences[0].request_id in request_ids:
                for sequence in ticket.sequences:
                    self._tickets[sequence] = ticket
                    self.scheduler.add(sequence)
        aborted = self.scheduler.abort(request_ids)
        self._held = [t for t in self._held if not t.done]
        self._tell(aborted)
        return len({sequence.request_id for sequence in aborted})

    def _pause(self, mode: PauseMode, drained: asyncio.Future[None]) -> None:
        self._admitting = False
        if mode == "abort":
            self._abort(None)
        self._draining.append(drained)
        if mode != "wait":
            self._drained()

    def _drained(self) -> None:
        self.paused = True
        for drained in self._draining:
            drained.get_loop().call_soon_threadsafe(_settle, drained, None, None)
        self._draining.clear()

    def _resume(self) -> None:
        self._drained()  # whoever still waits for the end of a pause that is over
        self.paused, self._admitting = False, True
        held, self._held = self._held, []
        for ticket in held:
            self._take(ticket)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
