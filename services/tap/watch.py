"""Shows runs live in a terminal: `rich` where there is one, plain lines where there is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from aiokafka import TopicPartition
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollstream.shared.bus import Bus, Lost, start, stop
from rollstream.shared.log_reader import LogReader
from rollstream.shared.runs import Registry, RunConfig, RunState, Status
from rollstream.shared.topics import data_topic, runs_topic

from .progress import RunProgress

REFRESH_S = 0.25
PLAIN_EVERY_S = 5.0


class Follower:
    """Reads all topics of one run as they grow, and the run's state."""

    def __init__(self, bus: Bus, config: RunConfig) -> None:
        self.progress = RunProgress(config)
        self.state: RunState | None = None
        self._bus = bus
        self._config = config

    async def run(self) -> None:
        """Until the run is done. Raises Lost."""
        config = self._config
        kinds = {
            data_topic(config.prefix, config.run, config.pipeline, kind): kind
            for kind in [*self.progress.flows, "ledger"]
        }
        tps = [TopicPartition(t, p) for t in kinds for p in range(config.partitions)]
        consumer = self._bus.reader()
        await start(consumer)
        try:
            consumer.assign(tps)
            for tp in tps:
                consumer.seek(tp, 0)
            async with LogReader(self._bus, runs_topic(config.prefix), [0]) as runs:
                registry = Registry()
                async for records in runs.to_end(timeout_s=60):
                    for record in records:
                        registry.apply(record.key, record.value)
                quiet = 0
                while quiet < 3:
                    got = await consumer.getmany(timeout_ms=int(REFRESH_S * 1000))
                    now_s = time.monotonic()
                    for tp, records in got.items():
                        for record in records:
                            self._take(kinds[tp.topic], tp.partition, record, now_s)
                    for record in await runs.more(0.01):
                        registry.apply(record.key, record.value)
                    found = registry.runs.get(config.run)
                    self.state = found.state if found else self.state
                    over = self.state is not None and self.state.status is Status.DONE
                    quiet = quiet + 1 if over and not got else 0
        finally:
            await stop(consumer)

    def _take(self, kind: str, partition: int, record: Any, now_s: float) -> None:
        if kind == "ledger":
            self.progress.ended(partition, record.value, list(record.headers))
        else:
            self.progress.record(kind, record.value, list(record.headers), now_s)


def view(progress: RunProgress, now_s: float) -> RenderableType:
    """The run's table as a rich renderable."""
    config = progress.config
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name, justify in (
        ("stage", "left"), ("", "left"), ("done", "right"), ("in flight", "right"),
        ("samples/s", "right"), ("mean reward", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for line in progress.lines(now_s):
        bar = ProgressBar(total=line.total, completed=min(line.done, line.total), width=20) \
            if line.total else Text("")
        done = f"{line.done}/{line.total}" if line.total else str(line.done)
        table.add_row(
            line.stage, bar, done, str(line.in_flight), f"{line.rate:.1f}",
            "" if line.mean_reward is None else f"{line.mean_reward:.3f}",
        )
    title = Text.assemble((config.run, "bold"), f"  {config.pipeline}  {config.model}")
    return Group(title, table, Text(progress.last, style="dim"), Text(""))


def plain(progress: RunProgress, now_s: float) -> str:
    """The same as one line, for logs."""
    parts = [
        f"{line.stage} {line.done}" + (f"/{line.total}" if line.total else "")
        + (f" r={line.mean_reward:.2f}" if line.mean_reward is not None else "")
        for line in progress.lines(now_s)
    ]
    return f"{progress.config.run}: " + " | ".join(parts)


async def follow(bus: Bus, configs: list[RunConfig], console: Console) -> list[Follower]:
    """Show the runs until all are done. Raises Lost where a topic can't be read any more."""
    followers = [Follower(bus, config) for config in configs]
    tasks = [asyncio.create_task(follower.run()) for follower in followers]
    try:
        await _show(followers, tasks, console)
        for task in tasks:
            await task  # waits: for the run, as long as somebody wants to see it
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=5)
    return followers


async def _show(
    followers: list[Follower], tasks: list[asyncio.Task[None]], console: Console
) -> None:
    def all_done() -> bool:
        return all(task.done() for task in tasks)

    def render() -> RenderableType:
        return Group(*(view(f.progress, time.monotonic()) for f in followers))

    if console.is_terminal:
        with Live(render(), console=console, auto_refresh=False) as live:
            while not all_done():
                _raise_first(tasks)
                live.update(render(), refresh=True)
                await asyncio.sleep(REFRESH_S)
            live.update(render(), refresh=True)
        return
    await _lines(followers, tasks, lambda text: console.print(
        text, highlight=False, markup=False, soft_wrap=True), all_done)


async def _lines(
    followers: list[Follower], tasks: list[asyncio.Task[None]],
    say: Callable[[str], None], all_done: Callable[[], bool],
) -> None:
    said: list[str] = []
    next_s = 0.0
    while not all_done():
        _raise_first(tasks)
        await asyncio.sleep(REFRESH_S)
        now = [plain(f.progress, time.monotonic()) for f in followers]
        if now != said and time.monotonic() >= next_s:
            for line in now:
                say(line)
            said, next_s = now, time.monotonic() + PLAIN_EVERY_S
    for follower in followers:
        say(plain(follower.progress, time.monotonic()))


def _raise_first(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error if isinstance(error, Lost) else Lost(str(error)) from error
