"""Where inference servers are, and which of them gets the next request.

`Endpoint` is a settings section (`[endpoints.NAME]`); `Pool` is a pure state machine.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

Outcome = Literal["ok", "fault", "stale", "unknown"]
"""The server answered; it failed in a way that may pass; it has other weights than are due; or the
caller gave up first."""

SLACK = 8
"""A group's requests stay on its server until that has this many more in flight than another."""
FAULTS_TO_OPEN = 3
PAUSE_S = 5.0
STALE_S = 1.0
"""For so long a server with other weights is left alone before it is looked at again."""


class Endpoint(msgspec.Struct, kw_only=True):
    """One named inference service: one or several servers that serve the same models.

    The key is named, never held: `api_key()` reads it when a client is made.
    """

    name: str = ""
    url: str | list[str]
    """Base URLs, with or without `/v1`; several as a list or separated by commas.

    `dns+http://NAME:PORT`: every address of the name is a server, looked up again and again.
    """
    api_key_env: str = ""
    api_key_file: str = ""
    models: list[str] = []

    @property
    def urls(self) -> list[str]:
        """The servers' roots, normalised. Raises ValueError naming the endpoint."""
        given = self.url.split(",") if isinstance(self.url, str) else self.url
        try:
            urls = [normalise(url) for url in given if url.strip()]
        except ValueError as error:
            raise ValueError(f"endpoints.{self.name}.url: {error}") from None
        if not urls:
            raise ValueError(f"endpoints.{self.name}.url is empty: give the server's base URL")
        return list(dict.fromkeys(urls))

    def api_key(self) -> str | None:
        """The key, or None where none is named. Raises ValueError where it can't be read."""
        field = f"endpoints.{self.name}."
        if self.api_key_env and self.api_key_file:
            raise ValueError(f"{field}api_key_env and api_key_file are both set: keep one")
        if self.api_key_env:
            if (key := os.environ.get(self.api_key_env)) is None:
                raise ValueError(
                    f"{field}api_key_env names {self.api_key_env}, which is not set: export it"
                )
        elif self.api_key_file:
            try:
                key = Path(self.api_key_file).read_text()
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "not text"
                raise ValueError(
                    f"{field}api_key_file {self.api_key_file} can't be read: {reason}"
                ) from None
        else:
            return None
        return key.strip() or None


def normalise(url: str) -> str:
    """A server's root: with a scheme, without `/v1` and trailing slashes.

    Raises ValueError where it is no http URL or carries a password.
    """
    text = url.strip()
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if "@" in parts.netloc:
        # Without the value: it holds a secret.
        raise ValueError("credentials in a URL end up in logs: use api_key_env or api_key_file")
    try:
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:
        port_is_valid = False
    if parts.scheme not in ("http", "https", "dns+http") or not parts.hostname or not port_is_valid:
        raise ValueError(f"{text!r} is no http URL: give one like http://localhost:9001/v1")
    if parts.query or parts.fragment:
        raise ValueError(f"{text!r} has a query or fragment: give the base URL only")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


class Server(msgspec.Struct):
    """What the pool knows of one URL."""

    url: str
    in_flight: int = 0
    faults: int = 0
    """Consecutive ones."""
    closed_until: float | None = None
    """While it fails, the time from which one request may try it; None when it works."""


class Pool:
    """Picks a server: sticky by key among the least loaded, leaving out what fails.

    After `FAULTS_TO_OPEN` consecutive faults a server gets no requests but one every `PAUSE_S`,
    until one of them succeeds. (Not "one at a time": a trial may be a generation of minutes.)
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._servers = [Server(url) for url in urls]

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers]

    def set_urls(self, urls: Sequence[str]) -> None:
        """Servers came or went; what is known of those that stay is kept."""
        known = {server.url: server for server in self._servers}
        self._servers = [known.get(url) or Server(url) for url in dict.fromkeys(urls)]

    def pick(self, key: str, now: float, avoid: Collection[str] = ()) -> str | None:
        """A URL, now counted as in flight; None while every server is paused.

        `avoid` (what this request already tried) is used only where nothing else is open.
        """
        usable = [s for s in self._servers if s.closed_until is None or s.closed_until <= now]
        if not usable:
            return None
        candidates = [s for s in usable if s.url not in avoid] or usable
        least = min(s.in_flight for s in candidates)
        near = [s for s in candidates if s.in_flight <= least + (SLACK if key else 0)]
        server = max(near, key=lambda s: _affinity(key, s.url)) if key else near[0]
        if server.closed_until is not None:
            server.closed_until = now + PAUSE_S
        server.in_flight += 1
        return server.url

    def finish(self, url: str, outcome: Outcome, now: float) -> None:
        """The request that `pick` counted is over."""
        server = next((s for s in self._servers if s.url == url), None)
        if server is None:
            return  # it has gone meanwhile
        server.in_flight -= 1
        if outcome == "ok":
            server.faults, server.closed_until = 0, None
        elif outcome == "fault":
            server.faults += 1
            if server.faults >= FAULTS_TO_OPEN:
                server.closed_until = now + PAUSE_S
        elif outcome == "stale":
            server.closed_until = now + STALE_S

    def has_untried(self, tried: Collection[str], now: float) -> bool:
        """Whether `pick` would find a server that is not in `tried`."""
        return any(
            s.url not in tried and (s.closed_until is None or s.closed_until <= now)
            for s in self._servers
        )

    def next_chance(self) -> float:
        """When the first server may be tried again (in the past where one works)."""
        return min((s.closed_until or 0.0 for s in self._servers), default=float("inf"))

    def in_flight(self) -> dict[str, int]:
        """Requests under way per URL."""
        return {server.url: server.in_flight for server in self._servers}


def _affinity(key: str, url: str) -> bytes:
    """Rendezvous hashing: a server that comes or goes moves only its own keys."""
    return hashlib.blake2b(f"{key}\0{url}".encode(), digest_size=8).digest()
