"""Looks at every run of a process and acts on silence: a log line, readiness, a new attempt, exit.

A run's fault doesn't stop other runs: where a process serves several, an attempt that does not move
is ended and begins again through the log. A process of one run (`--run`) exits instead.
"""

from __future__ import annotations

import time
from functools import partial

import structlog

from rollstream.shared.attendance import Attendance
from rollstream.shared.bus import Lost
from rollstream.shared.metrics import NO_PROGRESS, Metrics
from rollstream.shared.runs import Status
from rollstream.shared.service import RunContext
from rollstream.shared.settings import ServiceSettings
from rollstream.shared.watchdog import Level, Watchdog, limit_s

SILENT_LOOP_S = 30.0
"""A loop that has not gone round for so long counts as busy: it is stuck in something."""


class Vigil:
    """The watchdog of one process."""

    def __init__(self, attendance: Attendance, settings: ServiceSettings) -> None:
        self._attendance = attendance
        self._settings = settings
        self._dog = Watchdog()
        self._told: dict[tuple[str, str], Level] = {}
        self._silent_s: dict[tuple[str, str], float] = {}
        self._log = structlog.get_logger()

    def look(self) -> list[str]:
        """What is unhealthy, in words. Raises Lost where the process must end."""
        unhealthy: list[str] = []
        for context in self._attendance.contexts:
            key = (context.run.run, context.route.instance)
            now_s = time.monotonic()
            limit = self._settings.no_progress_s or limit_s(context.route.service, context.run)
            found = self._dog.look(
                key, done=context.progress.done, busy=busy(context, now_s), limit_s=limit,
                now_s=now_s,
            )
            self._show(context, found.silent_s)
            said = f"{key[0]}/{key[1]}: no progress for {found.silent_s:.0f} s"
            if found.level > self._told.get(key, Level.FINE):
                self._log.warning("no progress", run=key[0], stage=key[1], level=found.level.name,
                                  silent_s=round(found.silent_s), **_why(context))
            self._told[key] = found.level
            if found.level >= Level.UNHEALTHY:
                unhealthy.append(said)
            if found.level is Level.OVER:
                if self._settings.run:
                    raise Lost(f"{said} (limit {limit:g} s, three times over)")
                self._attendance.end_attempt(context)
                self._dog.forget(key)
        return unhealthy

    def _show(self, context: RunContext, silent_s: float) -> None:
        key = (context.run.pipeline, context.route.instance)
        if key not in self._silent_s:
            read = partial(self._silent_s.get, key)
            Metrics(context.run.pipeline, context.route.instance).gauge(NO_PROGRESS, read)
        self._silent_s[key] = silent_s


def busy(context: RunContext, now_s: float) -> bool:
    """Whether the stage has something to get done now.

    A member without a partition, one that stands by, and a paused run have not.
    """
    progress = context.progress
    if progress.alive_s and now_s - progress.alive_s > SILENT_LOOP_S:
        return True
    at_work = progress.state == "working" and context.status is not Status.PAUSED
    return at_work and bool(progress.in_flight or progress.queued)


def _why(context: RunContext) -> dict[str, object]:
    progress = context.progress
    return {
        "in_flight": progress.in_flight, "queued": progress.queued, "state": progress.state,
        "last_error": progress.last_error, "waiting_for": progress.waiting_for,
    }
