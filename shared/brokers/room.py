"""A broker on this machine as a service sees it: whether it lives, and how full its memory is.

The embedded broker never frees memory and takes everything with it when it ends, so a service that
knows its process need not wait for timeouts, and the producer stops in time.
"""

from __future__ import annotations

import psutil

ADMIT_BELOW = 0.8
"""Share of the cap above which nothing new is admitted: what is in flight still has to fit."""


class BrokerRoom:
    """`pid` 0: the broker is elsewhere, and nothing is known. `cap_bytes` 0: no cap."""

    def __init__(self, pid: int = 0, cap_bytes: int = 0) -> None:
        self.cap_bytes = cap_bytes
        self._gone = False
        self._process: psutil.Process | None = None
        try:
            self._process = psutil.Process(pid) if pid else None
        except psutil.NoSuchProcess:
            self._gone = True

    def gone(self) -> bool:
        """Whether its process has ended; never true of a broker elsewhere."""
        if self._process is not None and not self._gone:
            # By pid and start time: another process may have the pid by now.
            self._gone = (
                not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE
            )
        return self._gone

    def used_bytes(self) -> int:
        """Its resident memory, 0 where it is not known."""
        try:
            return self._process.memory_info().rss if self._process else 0
        except psutil.Error:
            return 0

    def why_full(self) -> str | None:
        """Why nothing may be admitted, or None."""
        if not self.cap_bytes or (used := self.used_bytes()) < ADMIT_BELOW * self.cap_bytes:
            return None
        return (
            f"the embedded broker holds {used / 2**20:.0f} of {self.cap_bytes / 2**20:.0f} MiB and "
            "frees none: nothing new is admitted (durable: rollstream up --broker kafka)"
        )
