"""Child processes of `rollstream up`: started in order, restarted when they die, ended together."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

GRACE_S = 20.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
UNSTARTABLE = 2
"""The exit code of a process that can't start; starting it again would not help."""


@dataclass
class Child:
    """One process and what it was started with."""

    name: str
    command: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    serves_others: bool = False
    """Others ask it until they have ended: it ends after them."""
    process: asyncio.subprocess.Process | None = None
    wanted: bool = True
    """Whether it is started again when it dies."""
    pause_s: float = FIRST_PAUSE_S
    started_s: float = 0.0
    log_from: int = 0
    """Where in its log what this process says begins, in bytes."""

    async def start(self) -> None:
        """Start it in a session of its own: the terminal's Ctrl-C is for us, we tell the child."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.started_s = time.monotonic()
        with self.log.open("ab") as log:
            self.log_from = log.tell()
            self.process = await asyncio.create_subprocess_exec(
                *self.command, stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **self.environment}, start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def lines(self) -> list[str]:
        """What it has said so far."""
        if not self.log.exists():
            return []
        return self.log.read_bytes()[self.log_from:].decode(errors="replace").splitlines()

    def last_words(self) -> str:
        """The last line of its log, which says why it could not start."""
        return next((line for line in reversed(self.lines()) if line.strip()), "(no output)")


class CannotStart(Exception):
    """A child can't start; the message is its own last line."""


class Children:
    """The children of one `up`."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._watch: list[asyncio.Task[None]] = []
        self.failed: asyncio.Future[str] | None = None

    async def start(self, child: Child) -> None:
        if self.failed is None:
            self.failed = asyncio.get_running_loop().create_future()
        self._children.append(child)
        await child.start()
        self._watch.append(asyncio.create_task(self._keep(child)))

    async def _keep(self, child: Child) -> None:
        """Start it again when it dies; give up where it says that it can't start."""
        while child.process is not None:
            # waits: for as long as the child lives
            code = await child.process.wait()
            if code == UNSTARTABLE:
                if self.failed is not None and not self.failed.done():
                    self.failed.set_result(child.last_words())
                return
            if time.monotonic() - child.started_s > LONGEST_PAUSE_S:
                child.pause_s = FIRST_PAUSE_S
            await asyncio.sleep(child.pause_s)
            if not child.wanted:
                return
            child.pause_s = min(LONGEST_PAUSE_S, child.pause_s * 2)
            await child.start()

    def running(self) -> list[Child]:
        """Those that run now."""
        return [child for child in self._children if child.running]

    async def wait_for_line(self, child: Child, text: str, timeout_s: float) -> str:
        """The first line said by the child that holds the text.

        Raises CannotStart where it ends first, or says nothing in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if found := [line for line in child.lines() if text in line]:
                return found[0]
            if not child.running:
                raise CannotStart(child.last_words())
            await asyncio.sleep(0.1)
        raise CannotStart(f"{child.name} did not start within {timeout_s:g} s, see {child.log}")

    async def left_alone(self, timeout_s: float) -> None:
        """Start nothing again, and wait, so long at most, for what needs the others to end."""
        deadline_s = time.monotonic() + timeout_s
        for child in self._children:
            child.wanted = False
        while time.monotonic() < deadline_s and any(
            child.running and not child.serves_others for child in self._children
        ):
            await asyncio.sleep(0.1)

    def check(self) -> None:
        """Raises CannotStart where a child has given up."""
        if self.failed is not None and self.failed.done():
            raise CannotStart(self.failed.result())

    async def stop(self) -> None:
        """End them, the last started first told, all waited for; kill what outlives the grace."""
        for task in self._watch:
            task.cancel()
        living = [child for child in reversed(self._children) if child.running]
        await _end([c.process for c in living if c.process and not c.serves_others])
        await _end([c.process for c in living if c.process and c.serves_others])


async def _end(processes: list[asyncio.subprocess.Process]) -> None:
    if not processes:
        return
    for process in processes:
        _signal(process, signal.SIGTERM)
    waits = [asyncio.create_task(process.wait()) for process in processes]
    await asyncio.wait(waits, timeout=GRACE_S)
    for process in processes:
        if process.returncode is None:
            _signal(process, signal.SIGKILL)
    await asyncio.wait(waits, timeout=5)


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except ProcessLookupError:
        pass


def service_child(name: str, folder: Path, environment: dict[str, str], *flags: str) -> Child:
    """The child that runs one service with this same Python."""
    program = [sys.executable, "-m", "rollstream.services.cli"]
    command = [*program, "run", name, "--with-parent", *flags]
    return Child(name, command, folder / "logs" / f"{name}.log", environment)
