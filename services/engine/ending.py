"""When an engine has to end: it is told to, or the process that it serves is gone."""

from __future__ import annotations

import asyncio
import signal

import psutil

from rollstream.services.engine.options import Fault

LOOK_S = 1.0


class Ending:
    """Made in the running loop; `reached` tells at once, `wait` when it comes."""

    def __init__(self, parent_pid: int | None) -> None:
        """Raises Fault where there is no such parent."""
        self._told = asyncio.Event()
        try:
            self._parent = None if parent_pid is None else psutil.Process(parent_pid)
        except psutil.Error as error:
            raise Fault(f"--parent-pid {parent_pid}: there is no such process") from error
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told.set)

    @property
    def reached(self) -> bool:
        return self._told.is_set() or not self._parent_lives()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it came within the time, which is without end where none is given."""
        loop = asyncio.get_running_loop()
        until_s = float("inf") if timeout_s is None else loop.time() + timeout_s
        while not self.reached and loop.time() < until_s:
            try:
                await asyncio.wait_for(self._told.wait(), min(LOOK_S, until_s - loop.time()))
            except TimeoutError:
                pass
        return self.reached

    def _parent_lives(self) -> bool:
        if self._parent is None:
            return True
        try:
            return self._parent.is_running() and self._parent.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
