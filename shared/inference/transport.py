"""HTTP to a pool of equal servers: one keep-alive session, bounded, retried, in time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import aiohttp
import msgspec
import structlog

from rollstream.shared.inference.dialects import waiting_requests
from rollstream.shared.inference.endpoints import Outcome, Pool
from rollstream.shared.inference.faults import Busy, DeadlinePassed, error_from, error_within_200
from rollstream.shared.inference.limits import Limit
from rollstream.shared.inference.names import addresses, is_name
from rollstream.shared.inference.types import InferenceError, ServerUnavailable
from rollstream.shared.policy import FIRST_LABEL

log = structlog.get_logger(__name__)

BACKOFF_S = 0.5
BACKOFF_MAX_S = 10.0
CONNECT_TIMEOUT_S = 10.0
ROOM_S = 3600.0
"""For so long a request waits for room at most; whoever asks has a deadline that comes first."""
WATCH_S = 2.0
LOOK_UP_S = 10.0
KEEP_ALIVE_S = 4.0
"""Less than a server's (vLLM's is 5): who closes an idle connection second risks a lost request."""


class Reply(msgspec.Struct):
    """A 200 answer."""

    body: bytes
    url: str
    attempts: int
    label: str = ""
    """Of the server's weights before the request, where `due` was given."""


class Due(Protocol):
    """Which weights a server must have to be asked."""

    @property
    def label(self) -> str:
        """Empty where any will do; it may change at any time."""
        ...

    async def confirm(self, url: str, until: float) -> str:
        """What the server says that it has. Raises InferenceError."""
        ...


@dataclass
class _Place:
    """One request's share of the limit, and how it ended."""

    outcome: Outcome = "unknown"


class Transport:
    """Requests to whichever server of the pool is best, again elsewhere where one fails."""

    def __init__(
        self, urls: list[str], *, api_key: str | None, max_concurrent: int,
        max_tokens_in_flight: int = 0, request_timeout_s: float,
    ) -> None:
        self.urls = urls
        self._pool = Pool([url for url in urls if not is_name(url)])
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._limit = Limit(max_concurrent, max_tokens_in_flight)
        self._turn = asyncio.Lock()
        self._freed = asyncio.Condition()
        self._watch: asyncio.Task[None] | None = None
        self._request_timeout_s = request_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._silent: set[str] = set()
        """Servers without vLLM's metrics."""
        self._last_fault: InferenceError | None = None
        """Of any request: the reason why servers are paused for all."""

    async def open(self) -> None:
        """Open the session, look names up; no connection is made yet."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            headers={"Content-Type": "application/json", **self._headers},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            trust_env=False,
        )
        await self._look_names_up()
        self._watch = asyncio.create_task(self._watch_servers())

    async def close(self) -> None:
        """Close the session; what is under way is cut, which makes a server abort it."""
        if self._watch is not None:
            self._watch.cancel()
        if self._session is not None:
            await self._session.close()

    @property
    def allowed_requests(self) -> int:
        """How many requests may be under way now."""
        return self._limit.allowed

    def in_flight(self) -> dict[str, int]:
        """Requests under way per URL, of every server that is known now."""
        return self._pool.in_flight()

    async def request(
        self,
        path: str,
        body: dict[str, Any] | None,
        *,
        until: float,
        sticky: str = "",
        max_attempts: int = 1,
        tokens: int = 0,
        due: Due | None = None,
    ) -> Reply:
        """POST `body` as JSON, or GET where there is none; `until` is a time.monotonic(), later by
        as long as the request had to wait for room.

        `tokens`: about how many it takes at the server, prompt and budget together. `due`: only a
        server that says that it has these weights is asked, and again after its answer: who has
        started anew meanwhile has others.

        Raises ContextOverflow and other InferenceErrors with the server's words; after
        `max_attempts` retryable ones the last of them, ServerUnavailable where no server could be
        reached; DeadlinePassed.
        """
        data = None if body is None else msgspec.json.encode(body)
        tried: list[str] = []
        failure: InferenceError | None = None
        while len(tried) < max_attempts:
            if failure and not self._pool.has_untried(tried, time.monotonic()):
                await self._pause(_backoff_s(len(tried), failure), until, failure)
            # The place first: a server picked before a long wait may be dead after it.
            asked_s = time.monotonic()
            async with self._place(tokens) as place:
                # The time is the server's: to wait for room here must not make a request fail.
                until += time.monotonic() - asked_s
                url, label = await self._pick(sticky, tried, until, failure, due)
                tried.append(url)
                try:
                    answer = await self._once(url, path, data, until, place, due)
                    return Reply(answer, url, len(tried), label)
                except InferenceError as error:
                    if not error.retryable:
                        raise
                    failure = self._last_fault = error
                    log.debug("inference_retry", path=path, attempt=len(tried), error=str(error))
        assert failure is not None
        raise failure

    async def wait_until_up(self, timeout_s: float) -> None:
        """Until one server lists its models (or says that it has no such list).

        Raises ServerUnavailable with URLs and last error; InferenceError at once on 401 and 403.
        """
        until = time.monotonic() + timeout_s
        last: InferenceError | None = None
        while True:
            await self._look_names_up()
            for url in self._pool.urls:
                try:
                    soon = min(until, time.monotonic() + CONNECT_TIMEOUT_S)
                    await self.exchange("GET", f"{url}/v1/models", None, soon)
                    return
                except InferenceError as error:
                    if error.status in (401, 403):
                        raise
                    if error.status is not None and not error.retryable:
                        return
                    last = last if isinstance(error, DeadlinePassed) and last else error
            if time.monotonic() + BACKOFF_S >= until:
                raise ServerUnavailable(
                    f"no inference server is up at {', '.join(self.urls)} after {timeout_s:g} s; "
                    f"last error: {last}", retryable=True,
                )
            await asyncio.sleep(BACKOFF_S)

    @asynccontextmanager
    async def _place(self, tokens: int) -> AsyncIterator[_Place]:
        """Room for one more request. Raises DeadlinePassed."""
        try:
            # One after the other: a big request must not be overtaken for ever by small ones.
            async with asyncio.timeout(ROOM_S), self._turn, self._freed:
                await self._freed.wait_for(lambda: self._limit.admits(tokens))
                self._limit.begin(tokens)
        except TimeoutError:
            words = f"no room within {ROOM_S:g} s: {self._limit.requests} requests are under way"
            raise DeadlinePassed(f"{words} (max_concurrent, or what the server can take)") from None
        place = _Place()
        try:
            yield place
        finally:
            self._limit.end(tokens, place.outcome, time.monotonic())
            # waits: nobody holds it across an await
            async with self._freed:
                self._freed.notify_all()

    async def _pick(
        self, sticky: str, tried: list[str], until: float, failure: InferenceError | None,
        due: Due | None,
    ) -> tuple[str, str]:
        """A server and the label of its weights, where some are due."""
        while True:
            while (url := self._pool.pick(sticky, time.monotonic(), tried)) is None:
                await self._pause(self._pool.next_chance() - time.monotonic(), until, failure)
            if due is None or not due.label:
                return url, ""
            outcome: Outcome = "unknown"
            try:
                label = await due.confirm(url, until)
                if label == due.label:
                    outcome = "ok"
                    return url, label
                outcome, self._last_fault = "stale", _other_weights(url, label, due.label)
            except DeadlinePassed:
                raise
            except InferenceError as error:
                outcome, self._last_fault = "fault", error
            finally:
                if outcome != "ok":
                    self._pool.finish(url, outcome, time.monotonic())

    async def _pause(self, seconds: float, until: float, failure: InferenceError | None) -> None:
        """Sleep, unless the deadline comes first: then its error, with what went wrong before."""
        if seconds < until - time.monotonic():
            await asyncio.sleep(max(0.0, seconds))
            return
        if failure is None or isinstance(failure, ServerUnavailable):
            reason = failure or self._last_fault
            raise ServerUnavailable(
                f"no endpoint could be reached before the deadline; last error: {reason}",
                retryable=True,
            ) from reason
        raise DeadlinePassed(f"the deadline comes first; last error: {failure}") from failure

    async def _once(
        self, url: str, path: str, data: bytes | None, until: float, place: _Place,
        due: Due | None,
    ) -> bytes:
        try:
            body = await self.exchange("GET" if data is None else "POST", url + path, data, until)
            if due is not None and due.label:
                # A newer version is fine, it came while the answer was made: not the first one.
                label = await due.confirm(url, until)
                if label == FIRST_LABEL:
                    raise _other_weights(url, label, due.label)
            place.outcome = "ok"
            return body
        except InferenceError as error:
            if not isinstance(error, DeadlinePassed):
                place.outcome = "fault" if error.retryable else "ok"
            raise
        finally:
            self._pool.finish(url, place.outcome, time.monotonic())

    # -- the servers ---------------------------------------------------------------------------

    async def _watch_servers(self) -> None:
        """Look at the queues, and the names up again, as long as the session is open."""
        looked_up_s = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            if time.monotonic() - looked_up_s >= LOOK_UP_S:
                looked_up_s = time.monotonic()
                await self._look_names_up()
            busy = [url for url, count in self._pool.in_flight().items() if count]
            if any([await self._queues(url) for url in busy]):
                self._limit.queueing(time.monotonic())

    async def _look_names_up(self) -> None:
        """A server for each address of a name; those of before where it can't be looked up now."""
        names = [url for url in self.urls if is_name(url)]
        if not names:
            return
        found = [url for url in self.urls if not is_name(url)]
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                for name in names:
                    found += await addresses(name)
        except (OSError, TimeoutError) as error:
            log.warning("inference_name_not_found", names=names, error=str(error))
            return
        self._pool.set_urls(found)

    async def _queues(self, url: str) -> bool:
        """Whether requests wait at a server that tells (vLLM's own number)."""
        if url in self._silent:
            return False
        try:
            until = time.monotonic() + WATCH_S
            body = await self.exchange("GET", f"{url}/metrics", None, until)
        except InferenceError as error:
            if error.status is not None:
                self._silent.add(url)
            return False
        return waiting_requests(body) > 0

    async def exchange(
        self, method: Literal["GET", "POST"], url: str, data: bytes | None, until: float
    ) -> bytes:
        """One request to one server; everything that goes wrong becomes an InferenceError."""
        if self._session is None:
            raise RuntimeError("the client is not open: use `async with`")
        try:
            async with asyncio.timeout(until - time.monotonic()):
                async with asyncio.timeout(self._request_timeout_s):
                    async with self._session.request(
                        method, url, data=data, allow_redirects=False
                    ) as response:
                        body = await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ServerUnavailable(f"{url}: {error}", retryable=True) from error
        except TimeoutError:
            if time.monotonic() >= until:
                raise DeadlinePassed(f"{url}: the deadline passed") from None
            limit = f"no answer within {self._request_timeout_s:g} s"
            raise InferenceError(f"{url}: {limit}", retryable=True) from None
        except (aiohttp.ClientError, OSError) as error:
            words = str(error) or type(error).__name__
            raise InferenceError(f"{url}: the connection broke: {words}", retryable=True) from error
        if 300 <= response.status < 400:
            target = response.headers.get("Location", "elsewhere")
            raise InferenceError(
                f"{url} redirects to {target}: name that in the endpoint's url",
                status=response.status,
            )
        status = response.status
        if status == 200:
            status = error_within_200(body) or 200
        if status != 200:
            raise error_from(status, body, url, response.headers.get("Retry-After"))
        return body


def _other_weights(url: str, label: str, due: str) -> InferenceError:
    return ServerUnavailable(f"{url} has the weights {label}, due are {due}", retryable=True)


def _backoff_s(failures: int, failure: InferenceError) -> float:
    """What the server asked for, and full jitter: who failed together must not return together."""
    asked_s = failure.retry_after_s if isinstance(failure, Busy) else 0.0
    return asked_s + random.uniform(0, min(BACKOFF_MAX_S, BACKOFF_S * 2**failures))
