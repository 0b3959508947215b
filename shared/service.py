"""What a service is to the rest of the system: a name, what it reads and writes, two coroutines.

A service knows one run at a time: it is asked whether it can serve a proposed run (`consider`), and
later attends it (`attend`) until the run ends or the call is cancelled. Services come in by entry
point (`rollstream.services`), this project's own like anybody's.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Protocol

from rollstream.shared.bus import Bus
from rollstream.shared.config import ConfigError
from rollstream.shared.routes import SERVICE_GROUP, Route
from rollstream.shared.runs import RunConfig, Status


@dataclass
class Progress:
    """What a stage of a run has done since this process attends it; for status pages."""

    done: int = 0
    failed: int = 0
    in_flight: int = 0
    queued: int = 0
    open_groups: int = 0
    partitions: list[int] = field(default_factory=list)
    state: str = "starting"
    last_error: str = ""
    waiting_for: str = ""
    """What keeps it from taking more, where it knows."""
    last_progress_s: float = 0.0
    alive_s: float = 0.0
    """When its loop went round last, by the monotonic clock; 0 while it has not begun."""

    def alive(self) -> None:
        """A sign of life from the loop."""
        self.alive_s = time.monotonic()


@dataclass
class RunContext:
    """All that a service needs to attend one run."""

    run: RunConfig
    route: Route
    bus: Bus
    drain_s: float = 60.0
    """The grace: how long work in flight may go on when the process is asked to end."""
    progress: Progress = field(default_factory=Progress)
    status: Status = Status.RUNNING
    """Follows the runs topic; `stopped` means: end what is open as cancelled."""
    reason: str = ""
    """Why it has that status."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever `status` changes."""
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when this process was asked to end: take nothing new, finish, return."""

    @property
    def ending(self) -> bool:
        """Whether to take nothing new: the process ends, or the run is over."""
        return self.draining.is_set() or self.status is Status.DONE

    def topic(self, kind: str) -> str:
        """The name of one of the run's topics."""
        if kind == "control":
            return f"{self.run.prefix}.{self.run.run}.control"
        return f"{self.run.prefix}.{self.run.run}.{self.run.pipeline}.{kind}"

    @property
    def group(self) -> str:
        """The consumer group of this stage instance in this run."""
        run = self.run
        return f"{run.prefix}.{run.run}.{run.pipeline}.{self.route.instance.replace(':', '-')}"


class Service(Protocol):
    """A kind of stage. One object serves every run of its process."""

    name: str
    consumes: frozenset[str] | None
    produces: str | None

    async def consider(self, run: RunConfig, route: Route) -> dict[str, Any]:
        """Facts about the run that others want to know; raises Refusal where it can't serve it."""
        ...

    async def attend(self, context: RunContext) -> None:
        """Work for the run until it is done, drained or cancelled.

        Raises Lost where the attempt is over and another may start.
        """
        ...

    async def close(self) -> None:
        """The process ends."""
        ...


def installed() -> dict[str, Any]:
    """The entry points of all services on this machine, by name."""
    return {point.name: point for point in entry_points(group=SERVICE_GROUP)}


def load(name: str, settings: Any) -> Service:
    """The service of that name, made with this process's settings.

    Raises ConfigError where none is installed or its package can't be imported.
    """
    points = installed()
    if name not in points:
        raise ConfigError("service", name, f"use one of: {', '.join(sorted(points))}")
    try:
        factory = points[name].load()
    except ImportError as error:
        raise ConfigError("service", name, f"install what it needs ({error})") from error
    return factory(settings)
