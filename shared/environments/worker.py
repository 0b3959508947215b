"""A scoring process: loads environments by reference and scores groups, one at a time.

Frames (4 bytes length, big endian, then msgpack) come on stdin and go to what was stdout;
whatever user code prints goes to stderr. The end of stdin is the order to leave.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import queue
import signal
import struct
import sys
import threading
from collections import OrderedDict
from typing import IO, TYPE_CHECKING

import msgspec

from rollstream.shared.environments.locate import EnvironmentUnusable
from rollstream.shared.environments.scoring import SampleScore, score_group
from rollstream.shared.records import EnvRef, Row, Sample

if TYPE_CHECKING:
    from rollstream.shared.environments.v0 import Environment

LENGTH = struct.Struct(">I")
_KEPT_ENVIRONMENTS = 8
_LEAVE_WITHIN_S = 5.0
_PR_SET_PDEATHSIG = 1


class Load(msgspec.Struct, tag="load"):
    """Have this environment ready."""

    ref: EnvRef


class Score(msgspec.Struct, tag="score"):
    """Score one group of an environment that is loaded."""

    ref: EnvRef
    row: Row
    samples: list[Sample]


class Loaded(msgspec.Struct, tag="loaded"):
    """The environment is there; its fingerprint as found here."""

    fingerprint: str


class Unusable(msgspec.Struct, tag="unusable"):
    """The environment can't be loaded here."""

    env: str
    reason: str


class Scores(msgspec.Struct, tag="scores"):
    """One score per sample, in order."""

    scores: list[SampleScore]


Request = Load | Score
Reply = Loaded | Unusable | Scores

_requests = msgspec.msgpack.Decoder(Request)
_encoder = msgspec.msgpack.Encoder()


def main() -> None:
    """Serve until stdin ends."""
    _die_with_parent()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    frames: queue.Queue[bytes | None] = queue.Queue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, frames), daemon=True).start()
    loaded: OrderedDict[bytes, Environment] = OrderedDict()
    with asyncio.Runner() as runner:
        while (frame := frames.get()) is not None:
            reply = runner.run(_answer(_requests.decode(frame), loaded))
            body = _encoder.encode(reply)
            replies.write(LENGTH.pack(len(body)) + body)
            replies.flush()


async def _answer(request: Request, loaded: OrderedDict[bytes, Environment]) -> Reply:
    try:
        env = _environment(request.ref, loaded)
    except EnvironmentUnusable as error:
        return Unusable(error.env, error.reason)
    if isinstance(request, Load):
        return Loaded(env.ref.fingerprint)
    return Scores(await score_group(env, request.row, request.samples))


def _environment(ref: EnvRef, loaded: OrderedDict[bytes, Environment]) -> Environment:
    key = _encoder.encode(ref)
    if key in loaded:
        loaded.move_to_end(key)
        return loaded[key]
    if ref.api != "v0":
        raise EnvironmentUnusable(ref.id, f"api {ref.api!r} is not served here: only 'v0' is")
    from rollstream.shared.environments.v0 import load

    loaded[key] = load(ref.id, ref.args)
    if len(loaded) > _KEPT_ENVIRONMENTS:
        loaded.popitem(last=False)
    return loaded[key]


def _read(stdin: IO[bytes], frames: queue.Queue[bytes | None]) -> None:
    """Pass frames on; when the parent is gone, let the main thread leave or leave for it."""
    while len(head := stdin.read(LENGTH.size)) == LENGTH.size:
        frames.put(stdin.read(LENGTH.unpack(head)[0]))
    frames.put(None)
    threading.Event().wait(_LEAVE_WITHIN_S)
    os._exit(1)


def _die_with_parent() -> None:
    """On Linux the kernel ends us with our parent, even inside a C loop that holds the GIL."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
