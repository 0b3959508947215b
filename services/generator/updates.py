"""New policy weights: every generator follows what the trainer announces, one brings it about.

A version is live on an endpoint when the endpoint itself confirms it. Of all generators of a run
one holds the office of updater; it looks at every endpoint each second, so that one that started
again, or came later, gets the weights before it gets a request (`transport.Due`). Each step may be
done again: a dead updater's successor goes on where the endpoint says that it stands.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import structlog

from rollstream.shared.codec import Undecodable, decode
from rollstream.shared.control import PolicyLive
from rollstream.shared.inference.client import InferenceClient
from rollstream.shared.inference.types import InferenceError
from rollstream.shared.inference.weights import Adapters, NamedWeights
from rollstream.shared.log_reader import LogReader
from rollstream.shared.policy import Policy
from rollstream.shared.role import STEP_DOWN_S, Active, run_active
from rollstream.shared.runs import RunConfig
from rollstream.shared.service import Progress, RunContext

from .generate import Generate

LOOK_S = 1.0
ANSWER_S = 10.0
READ_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before an endpoint that failed to take weights is tried again."""

log = structlog.get_logger("rollstream.generator")


async def kept_current(
    context: RunContext, client: InferenceClient, generate: Generate,
    work: Callable[[], Awaitable[None]],
) -> None:
    """Do the work while only endpoints with the announced weights are asked.

    One generator of the run brings the weights there. Raises what the first of these tasks raises.
    """
    run = context.run
    policy, known = Policy(), asyncio.Event()
    updater = Updater(run, client, policy)
    if run.updates.method == "lora":
        client.due = adapters = updater.adapters
        generate.model = lambda: adapters.name(policy.label) if policy.label else run.model
    else:
        client.due = updater.named

    async def stage() -> None:
        # waits: its setter ends the attempt where it fails
        await known.wait()
        await work()

    office = replace(context, progress=Progress())
    working = asyncio.create_task(stage())
    pending = {
        working, asyncio.create_task(follow(context, policy, known)),
        asyncio.create_task(run_active(office, updater.run, office="updater")),
    }
    try:
        while not working.done():
            # waits: for as long as the run is attended
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=STEP_DOWN_S)


async def follow(context: RunContext, policy: Policy, known: asyncio.Event) -> None:
    """Keep the policy as the control topic has it; `known` once it is up to date. Raises Lost."""
    async with LogReader(context.bus, context.topic("control"), [0]) as control:
        async for records in control.to_end(READ_S):
            hear(policy, records)
        known.set()
        while True:
            if hear(policy, await control.more(LOOK_S)):
                log.info("policy announced", run=context.run.run, label=policy.label,
                         weights=policy.weights)


def hear(policy: Policy, records: list) -> bool:
    """Take records of the control topic in; whether another version is due now."""
    moved = False
    for record in records:
        try:
            moved |= policy.apply(decode(record.value, list(record.headers)))
        except Undecodable:
            continue
    return moved


class Updater:
    """The work of the one that holds the office."""

    def __init__(self, run: RunConfig, client: InferenceClient, policy: Policy) -> None:
        self._run = run
        self._client = client
        self._policy = policy
        self.named = NamedWeights(policy, client.weights)
        self.adapters = Adapters(policy, client.weights, run.run)
        self._pauses: dict[str, tuple[float, float]] = {}
        """By URL: when it may be tried again, and how long the pause after that is."""

    async def run(self, active: Active) -> None:
        """Bring every endpoint up to date, for as long as the office is ours. Raises Lost."""
        while True:
            if self._policy.label:
                urls = list(self._client.in_flight())
                # waits: each of its calls has a deadline
                for lives in await asyncio.gather(*map(self._look_after, urls)):
                    if lives is not None and self._policy.live.get(lives.url) != lives.label:
                        await active.writer.send(active.control_topic, 0, lives)
                        self._policy.apply(lives)
            await asyncio.sleep(LOOK_S)

    async def _look_after(self, url: str) -> PolicyLive | None:
        """What the endpoint confirms, once it is what is due."""
        again_s, pause_s = self._pauses.get(url, (0.0, FIRST_PAUSE_S))
        if time.monotonic() < again_s:
            return None
        label = self._policy.label
        try:
            if self._run.updates.method == "lora":
                found = await self._adapter(url)
            else:
                found = await self._weights(url)
        except InferenceError as error:
            log.warning("endpoint not up to date", run=self._run.run, url=url, label=label,
                        error=str(error))
            longer_s = min(LONGEST_PAUSE_S, pause_s * 2)
            self._pauses[url] = time.monotonic() + pause_s, longer_s
            return None
        self._pauses.pop(url, None)
        return PolicyLive(url=url, label=label) if found == label == self._policy.label else None

    async def _weights(self, url: str) -> str:
        routes, label = self._client.weights, self._policy.label
        found = await self.named.confirm(url, time.monotonic() + ANSWER_S)
        if self._run.updates.method != "reload":
            return found
        if found == label:
            await routes.resume(url)
            return found
        log.info("endpoint loads weights", run=self._run.run, url=url, has=found, due=label)
        await routes.reload(url, label, self._policy.weights, self._run.updates.in_flight)
        return await self.named.confirm(url, time.monotonic() + ANSWER_S)

    async def _adapter(self, url: str) -> str:
        """Load this version's, and let go of those before the last but one."""
        routes, label = self._client.weights, self._policy.label
        until = time.monotonic() + ANSWER_S
        found = await self.adapters.confirm(url, until)
        if found == label:
            return found
        ours = [name for name in await routes.models(url, until)
                if name.startswith(self.adapters.name(""))]
        await routes.load_adapter(url, self.adapters.name(label), self._policy.weights)
        for name in ours[:-1]:
            await routes.unload_adapter(url, name)
        return await self.adapters.confirm(url, time.monotonic() + ANSWER_S)
