"""Which runs one service process attends: loops come and go as the runs topic changes.

Each run has a task of its own; a run's fault doesn't stop other runs. An attempt that ends ("not
mine any more", a server that says no) starts again with a growing pause, its state shown.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import structlog
from aiokafka.errors import KafkaError

from rollstream.shared.bus import Bus, Lost
from rollstream.shared.control import Answer
from rollstream.shared.dead_letters import TooManyFailures
from rollstream.shared.log_reader import LogReader
from rollstream.shared.registry import read_registry, set_status
from rollstream.shared.routes import Route
from rollstream.shared.runs import Refusal, Registry, Run, RunConfig, Status
from rollstream.shared.service import RunContext, Service
from rollstream.shared.step import Blocked, PausesRun
from rollstream.shared.topics import control_topic, runs_topic

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
FOLLOW_S = 0.5
TOLD_S = 10.0
CLEAN_UP_S = 30.0
"""After the grace: last commits, and clients that may hang while they are closed."""


class Attendance:
    """Answers proposals and keeps one task for each (run, stage instance) that is live."""

    def __init__(
        self, service: Service, bus: Bus, prefix: str, *, run: str = "", instance: str = "",
        drain_s: float = 60.0,
    ) -> None:
        self._service = service
        self._bus = bus
        self._topic = runs_topic(prefix)
        self._prefix = prefix
        self._only_run = run
        self._drain_s = drain_s
        self._only_instance = instance
        self._registry = Registry()
        self._contexts: dict[tuple[str, str], RunContext] = {}
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._answers: dict[tuple[str, str], asyncio.Task[None]] = {}
        """One for each (proposal, stage instance) that is asked about now, done or not."""
        self._draining = False
        self.caught_up = False
        self._log = structlog.get_logger().bind(service=service.name)

    async def follow(self) -> None:
        """Follow the runs topic for ever. Raises Lost where it can't be read."""
        async with LogReader(self._bus, self._topic, [0]) as log:
            async for records in log.to_end(timeout_s=60):
                self._apply(records)
            self.caught_up = True
            self._reconcile()
            while True:
                if records := await log.more(FOLLOW_S):
                    self._apply(records)
                self._reconcile()

    async def drain(self) -> None:
        """Take nothing new, finish what is in flight, within the grace."""
        self._draining = True
        for answer in self._answers.values():
            answer.cancel()
        for context in self._contexts.values():
            context.draining.set()
        tasks = [*self._tasks.values(), *self._answers.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._drain_s + CLEAN_UP_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=10)

    def status(self) -> dict[str, Any]:
        """What is attended and how it goes, for /statusz."""
        return {
            f"{run}/{instance}": vars(context.progress) | {"status": context.status}
            for (run, instance), context in self._contexts.items()
        }

    def end_attempt(self, context: RunContext) -> None:
        """Let go of a run's attempt that does not move; the next one begins within a second."""
        task = self._tasks.get((context.run.run, context.route.instance))
        if task is not None:
            task.cancel()

    @property
    def contexts(self) -> list[RunContext]:
        return list(self._contexts.values())

    # -- what the runs topic says ---------------------------------------------------------------

    def _apply(self, records: list[Any]) -> None:
        for record in records:
            try:
                self._registry.apply(record.key, record.value)
            except ValueError as error:
                self._log.error("unreadable run record", key=str(record.key), error=str(error))

    def _reconcile(self) -> None:
        if self._draining:
            return
        live: set[tuple[str, str]] = set()
        asked: set[tuple[str, str]] = set()
        for run in list(self._registry.runs.values()):
            if self._only_run and run.id != self._only_run:
                continue
            if run.status is Status.PROPOSED:
                asked |= self._consider(run)
            for route in self._mine(run.config):
                if run.status is not None and (run.status.live or run.status is Status.DONE):
                    live.add((run.id, route.instance))
                    self._ensure(run, route)
        for key in set(self._answers) - asked:
            # Withdrawn, or decided without us: its topics may be gone by the time we knew.
            self._answers.pop(key).cancel()
        for key in set(self._contexts) - live:
            self._contexts.pop(key).draining.set()
            if (task := self._tasks.pop(key, None)) is not None:
                task.cancel()

    def _mine(self, config: RunConfig | None) -> list[Route]:
        return [
            route for route in (config.stages if config else [])
            if route.service == self._service.name
            and self._only_instance in ("", route.instance)
        ]

    def _ensure(self, run: Run, route: Route) -> None:
        key = (run.id, route.instance)
        context = self._contexts.get(key)
        if context is None:
            if run.status is Status.DONE or run.config is None:
                return
            context = self._contexts[key] = RunContext(
                run.config, route, self._bus, drain_s=self._drain_s
            )
        if run.status is not None and context.status is not run.status:
            context.status = run.status
            context.reason = run.state.reason if run.state else ""
            context.changed.set()
        if run.status is Status.DONE:
            return
        task = self._tasks.get(key)
        if task is None or task.done():
            self._tasks[key] = asyncio.create_task(self._attend(context))

    async def _attend(self, context: RunContext) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            started_s = time.monotonic()
            context.progress.alive_s, context.progress.state = 0.0, "starting"
            try:
                await self._service.attend(context)
                context.progress.state = "done" if context.status is Status.DONE else "stopped"
                return
            except asyncio.CancelledError:
                raise
            except PausesRun as error:
                context.progress.state = "paused"
                context.progress.last_error = str(error)
                await self._pause_run(context)
                await self._until_told(context)
            except TooManyFailures as error:
                context.progress.state = "blocked"
                context.progress.last_error = str(error)
                self._log.error("run blocked", run=context.run.run,
                                stage=context.route.instance, error=str(error))
                await self._until_told(context)
            except Exception as error:
                context.progress.state = "retrying"
                context.progress.last_error = str(error) or type(error).__name__
                expected = isinstance(error, Lost | Blocked)
                self._log.warning(
                    "attempt ended", run=context.run.run, stage=context.route.instance,
                    error=context.progress.last_error, exc_info=not expected,
                )
            if context.ending:
                return
            if time.monotonic() - started_s > LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            try:
                await asyncio.wait_for(context.draining.wait(), pause_s)
                return
            except TimeoutError:
                pause_s = min(LONGEST_PAUSE_S, pause_s * 2)

    async def _pause_run(self, context: RunContext) -> None:
        """Say in the runs topic why the run can't go on; other runs do."""
        run, why = context.run, f"{context.route.instance}: {context.progress.last_error}"
        self._log.error("run paused", run=run.run, stage=context.route.instance, error=why)
        context.changed.clear()
        try:
            now = (await read_registry(self._bus, self._prefix)).runs.get(run.run)
            if now is not None and now.status is Status.RUNNING:
                await set_status(self._bus, self._prefix, run.run, Status.PAUSED, why)
                # waits: until the runs topic brings it back to us
                await asyncio.wait_for(context.changed.wait(), TOLD_S)
        except (Lost, KafkaError, TimeoutError) as error:
            self._log.warning("could not pause the run", run=run.run, error=str(error))

    async def _until_told(self, context: RunContext) -> None:
        """Wait for somebody to look: `runs pause` and `resume`, or the end of this process."""
        context.changed.clear()
        waits = [asyncio.ensure_future(e.wait()) for e in (context.changed, context.draining)]
        try:
            # waits: for a person; the run shows as blocked
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    # -- proposals --------------------------------------------------------------------------------

    def _consider(self, run: Run) -> set[tuple[str, str]]:
        """Answer the proposal once for each instance of ours; the keys of these answers."""
        proposal = run.state.proposal if run.state else None
        keys: set[tuple[str, str]] = set()
        for route in self._mine(proposal):
            if proposal is None:
                continue
            keys.add(key := (proposal.log_id, route.instance))
            if key not in self._answers:
                self._answers[key] = asyncio.create_task(self._answer(proposal, route))
        return keys

    async def _answer(self, proposal: RunConfig, route: Route) -> None:
        try:
            facts = await self._service.consider(proposal, route)
            answer = self._said(proposal, route, facts=facts, accepted=True)
        except Refusal as refusal:
            answer = self._said(proposal, route, accepted=False, reason=str(refusal))
        except Exception as error:
            self._log.exception("could not consider the run", run=proposal.run)
            reason = f"{route.instance} failed to look at the run: {type(error).__name__}: {error}"
            answer = self._said(proposal, route, accepted=False, reason=reason)
        self._log.info(
            "run considered", run=proposal.run, stage=route.instance,
            accepted=answer.accepted, reason=answer.reason,
        )
        try:
            # A writer for this answer alone: a client keeps asking for the topics that it has
            # written to, and some brokers create what they are asked for.
            writer = await self._bus.writer()
            try:
                await writer.send(control_topic(self._prefix, proposal.run), 0, answer)
            finally:
                await writer.close()
        except (Lost, KafkaError, TimeoutError) as error:
            self._log.warning("answer not sent", run=proposal.run, error=str(error))
            self._answers.pop((proposal.log_id, route.instance), None)

    def _said(self, proposal: RunConfig, route: Route, **rest: Any) -> Answer:
        return Answer(
            instance=route.instance, service_id=self._bus.client_id, proposal=proposal.log_id,
            **rest,
        )
