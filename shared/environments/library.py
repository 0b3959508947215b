"""The environments of one process, each loaded once: loading takes seconds, runs come and go."""

from __future__ import annotations

import threading
from typing import Any

import msgspec

from rollstream.shared.environments import v0


class Library:
    """Loaded environments by id and arguments; may be asked from any thread.

    An environment whose code changed is loaded anew only by a new process.
    """

    def __init__(self) -> None:
        self._loaded: dict[bytes, v0.Environment] = {}
        self._lock = threading.Lock()

    def get(self, env_id: str, args: dict[str, Any]) -> v0.Environment:
        """The environment, loaded on the first call. Raises EnvironmentUnusable."""
        key = msgspec.json.encode([env_id, args], order="sorted")
        with self._lock:
            if key not in self._loaded:
                self._loaded[key] = v0.load(env_id, args)
            return self._loaded[key]
