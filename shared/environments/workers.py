"""Scoring in processes that can be killed: user code may hang, crash or eat memory there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from types import TracebackType

import msgspec

from rollstream.shared.environments.locate import EnvironmentUnusable
from rollstream.shared.environments.scoring import SampleScore
from rollstream.shared.environments.worker import (
    LENGTH,
    Load,
    Loaded,
    Reply,
    Request,
    Score,
    Scores,
    Unusable,
)
from rollstream.shared.records import EnvRef, Row, Sample

_replies = msgspec.msgpack.Decoder(Reply)
_encoder = msgspec.msgpack.Encoder()


class ScoringTimeout(TimeoutError):
    """Scoring passed its deadline; the worker was killed and is replaced."""


class WorkerDied(RuntimeError):
    """The worker ended while it was scoring (a crash, or killed for its memory)."""


class FingerprintMismatch(ValueError):
    """The environment loaded here is not the one the row came from."""

    def __init__(self, ref: EnvRef, found: str) -> None:
        super().__init__(
            f"environment {ref.id!r}: the row's fingerprint is {ref.fingerprint}, here it is "
            f"{found}: install the same versions of verifiers and of the environment"
        )
        self.ref = ref
        self.found = found


class ScoringPool:
    """`size` worker processes, started when first needed, each scoring one group at a time."""

    def __init__(
        self, size: int, timeout_s: float = 60.0, *, load_timeout_s: float = 300.0
    ) -> None:
        self.timeout_s = timeout_s
        self.load_timeout_s = load_timeout_s
        self._closed = False
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._workers = [_Worker() for _ in range(size)]
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def __aenter__(self) -> ScoringPool:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def score(
        self, ref: EnvRef, row: Row, samples: list[Sample], timeout_s: float | None = None
    ) -> list[SampleScore]:
        """One score per sample, in order.

        The deadline counts from when a worker has the environment loaded; loading has its own.
        Raises ScoringTimeout, WorkerDied, FingerprintMismatch, EnvironmentUnusable.
        """
        # waits: a worker is back at its own deadline, killed or not
        worker = await self._idle.get()
        try:
            await self._load(worker, ref)
            limit = self.timeout_s if timeout_s is None else timeout_s
            reply = await self._ask(worker, Score(ref, row, samples), f"scoring {ref.id}", limit)
        finally:
            self._idle.put_nowait(worker)
        if not isinstance(reply, Scores):
            raise _unexpected(reply)
        return reply.scores

    async def check(self, ref: EnvRef) -> str:
        """Have one worker load the environment; its fingerprint here.

        Raises EnvironmentUnusable, FingerprintMismatch, ScoringTimeout, WorkerDied.
        """
        # waits: a worker is back at its own deadline, killed or not
        worker = await self._idle.get()
        try:
            return await self._load(worker, ref)
        finally:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        """End all workers, those in the middle of a group too, within a few seconds."""
        self._closed = True
        # waits: a worker that does not end is killed
        await asyncio.gather(*(worker.end() for worker in self._workers))

    async def _load(self, worker: _Worker, ref: EnvRef) -> str:
        reply = await self._ask(worker, Load(ref), f"loading {ref.id}", self.load_timeout_s)
        if not isinstance(reply, Loaded):
            raise _unexpected(reply)
        if ref.fingerprint not in ("", reply.fingerprint):
            raise FingerprintMismatch(ref, reply.fingerprint)
        return reply.fingerprint

    async def _ask(self, worker: _Worker, request: Request, what: str, limit_s: float) -> Reply:
        """One request to one worker. A worker that didn't answer is not asked again."""
        answered = False
        if self._closed:
            raise WorkerDied(f"the scoring pool was closed before {what}")
        try:
            async with asyncio.timeout(limit_s):
                reply = await worker.ask(request)
            answered = True
            return reply
        except TimeoutError as error:
            raise ScoringTimeout(f"{what} took more than {limit_s:g} s") from error
        except (EOFError, ConnectionError) as error:
            raise WorkerDied(f"the worker died while {what}") from error
        finally:
            if not answered:
                worker.kill()


class _Worker:
    """One process slot; a killed process is replaced by the next request."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, request: Request) -> Reply:
        """Raises EOFError or ConnectionError where the process ends before it answers."""
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "rollstream.shared.environments.worker",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                # our import path, not the current folder's: the same environments are found there
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.curdir for p in sys.path)},
                start_new_session=True,  # its own group: killing it takes its children along
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        body = _encoder.encode(request)
        stdin.write(LENGTH.pack(len(body)) + body)
        await stdin.drain()
        head = await stdout.readexactly(LENGTH.size)
        return _replies.decode(await stdout.readexactly(LENGTH.unpack(head)[0]))

    def kill(self) -> None:
        """End the process and what it started; the next request starts another."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            _kill_group(process.pid)

    async def end(self, within_s: float = 6.0) -> None:
        """Ask the process to leave, then kill it."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), within_s)
            return
        _kill_group(process.pid)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), within_s)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _unexpected(reply: Reply) -> Exception:
    if isinstance(reply, Unusable):
        return EnvironmentUnusable(reply.env, reply.reason)
    return WorkerDied(f"the worker answered with {type(reply).__name__}")
