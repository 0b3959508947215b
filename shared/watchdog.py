"""No progress while there is work: a warning, then unhealthy, then the end. Pure.

A stage makes progress when something gets done; while it has nothing to do it needs none. What it
may take is derived from the run's own deadlines, so that an honest long generation never counts.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import NamedTuple

from rollstream.shared.runs import RunConfig

SLACK_S = 60.0
"""On top of the deadlines: a rebalance, a slow broker, one more round of retries."""


class Level(IntEnum):
    """How bad it is: reached at one, two and three times the limit."""

    FINE = 0
    WARNING = 1
    UNHEALTHY = 2
    OVER = 3


def limit_s(service: str, run: RunConfig) -> float:
    """For how long a stage may honestly get nothing done although it has work."""
    deadlines = run.deadlines
    longest = {
        "generator": deadlines.sample_s,
        "scorer": deadlines.scoring_s * (run.max_attempts + 1),
        "teacher-distiller": deadlines.teacher_s,
        "prompt-producer": SLACK_S,
        "sink": SLACK_S,
    }
    # A service of somebody else's: as long as any of ours.
    return longest.get(service, max(longest.values())) + SLACK_S


class Finding(NamedTuple):
    """How long a stage has got nothing done, and what that means."""

    level: Level
    silent_s: float


class _Mark(NamedTuple):
    done: int
    busy: bool
    since_s: float


class Watchdog:
    """Watches stages by any key; `now_s` is of one monotonic clock."""

    def __init__(self) -> None:
        self._marks: dict[object, _Mark] = {}

    def look(
        self, key: object, *, done: int, busy: bool, limit_s: float, now_s: float
    ) -> Finding:
        """What is to be said of a stage that has done so much and is busy or not."""
        mark = self._marks.get(key)
        if mark is None or (done, busy) != mark[:2]:
            mark = self._marks[key] = _Mark(done, busy, now_s)
        if not busy:
            return Finding(Level.FINE, 0.0)
        silent_s = now_s - mark.since_s
        return Finding(Level(min(Level.OVER, int(silent_s / limit_s))), silent_s)

    def forget(self, key: object) -> None:
        self._marks.pop(key, None)


REJOINS_A_MINUTE = 5
REJOIN_MINUTES = 3


class Rejoins:
    """Counts how often this process was given partitions anew.

    Two processes with one member id throw each other out several times a second, for ever, and
    nothing gets done (aiokafka issues 625, 1037 loop likewise). Members that come, go or are killed
    cause a burst; more than five a minute for three minutes on end is no burst.
    """

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {}

    def joined(self, group: str, now_s: float) -> None:
        times = self._times.setdefault(group, deque())
        times.append(now_s)
        while times and now_s - times[0] > 60 * REJOIN_MINUTES:
            times.popleft()

    def too_often(self, now_s: float) -> str | None:
        """The group that this process keeps joining, or None."""
        for group, times in self._times.items():
            minutes = [int((now_s - at) // 60) for at in times]
            if all(minutes.count(m) > REJOINS_A_MINUTE for m in range(REJOIN_MINUTES)):
                return group
        return None
