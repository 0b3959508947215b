"""A broker as a child process of ours: it ends with its owner, and with nothing else."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import psutil

BrokerKind = Literal["embedded", "kafka"]

_WATCH = 'read -r _ || kill -KILL "$0"'
"""Shell of the watcher: its standard input ends when we do, also after kill -9, and then it kills
the broker. A line means: stand down. (PR_SET_PDEATHSIG is tied to the thread that started the
child, and exists on Linux only.)"""


class BrokerError(RuntimeError):
    """The broker could not be started; one line, with the log's last words."""


class Broker:
    """A running broker on 127.0.0.1 that this process owns.

    It has its own session, so that Ctrl-C in the terminal reaches us and not the broker.
    """

    def __init__(
        self, kind: BrokerKind, bootstrap: str, process: subprocess.Popen[bytes], log_path: Path
    ) -> None:
        self.kind: BrokerKind = kind
        self.bootstrap = bootstrap
        self.pid = process.pid
        self.log_path = log_path
        self._process = process
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH, str(process.pid)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def alive(self) -> bool:
        """Whether it still runs. Leaves a dead one unreaped: the watcher must not meet a new
        process with its pid."""
        if self._process.returncode is not None:
            return False
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def rss_bytes(self) -> int:
        """Resident memory in bytes, 0 when it has ended."""
        try:
            return psutil.Process(self.pid).memory_info().rss if self.alive() else 0
        except psutil.Error:
            return 0

    def stop(self, timeout_s: float = 20.0) -> None:
        """SIGTERM, then SIGKILL after `timeout_s`. Harmless when it has ended already."""
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._bury()

    def kill(self) -> None:
        """SIGKILL, as a crash would be; what it had on disk stays."""
        self._process.kill()
        self._bury()

    def _bury(self) -> None:
        """Reap it and send the watcher home."""
        self._process.wait(10)
        if self._watcher.returncode is None:
            self._watcher.communicate(b"\n", timeout=10)


def spawn(command: list[str], log_path: Path) -> subprocess.Popen[bytes]:
    """Start the command in a session of its own, output appended to `log_path`."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_until(ready: Callable[[], bool], broker: Broker, timeout_s: float) -> bool:
    """Wait for `ready`; False when the broker ended or the time is over."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not broker.alive():
            return False
        if ready():
            return True
        time.sleep(0.02)
    return False


def free_port() -> int:
    """A port of 127.0.0.1 that is free now; somebody may take it before we do."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def is_free(port: int) -> bool:
    """Whether the port of 127.0.0.1 can be bound now."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def log_since(log_path: Path, offset: int) -> str:
    """What was logged from `offset` bytes on; empty where there is no log yet."""
    try:
        with log_path.open("rb") as log:
            log.seek(offset)
            return log.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def last_words(text: str) -> str:
    """The end of a log in one line, for an error message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-600:] or "(nothing)"


def log_size(log_path: Path) -> int:
    return log_path.stat().st_size if log_path.exists() else 0
