"""The offset that may be committed, and the hint that goes with it.

The commit says where to read from after a restart; the hint says what above it is finished already
and from where to read the stage's own output. Only a hint: without it the restart reads more.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections import OrderedDict

import msgspec

from rollstream.shared.seen import SeenState

MAX_HINT_CHARACTERS = 4096
"""Kafka's `offset.metadata.max.bytes`; a longer one fails the partition's commit."""


class Frontier:
    """The offset below which everything that was read of a partition is done.

    Offsets come in increasing order, with gaps (compaction, transaction markers); they are done in
    any order. The frontier never passes an offset that is not done, and never goes back.
    """

    def __init__(self, position: int) -> None:
        self._next = position
        self._open: OrderedDict[int, None] = OrderedDict()

    def add(self, offset: int) -> None:
        """An offset was read. Raises ValueError where it is not above all earlier ones."""
        if offset < self._next:
            raise ValueError(f"offset {offset} read again: {self._next} was expected")
        self._open[offset] = None
        self._next = offset + 1

    def done(self, offset: int) -> None:
        """Its output is acknowledged, or it needs none."""
        self._open.pop(offset, None)

    def skip_to(self, offset: int) -> None:
        """Go on from here: nothing before it is left to be read. Nothing may be open."""
        self._next = max(self._next, offset)

    @property
    def position(self) -> int:
        """The offset to commit."""
        return next(iter(self._open), self._next)

    @property
    def next_offset(self) -> int:
        """The offset that is read next."""
        return self._next

    def __len__(self) -> int:
        return len(self._open)


class Hint(msgspec.Struct, frozen=True, array_like=True):
    """What a commit's metadata says beside the offset."""

    out_position: int = 0
    """The stage's own output partition holds everything finished below here in `seen`."""
    seen: SeenState = SeenState()
    dispatched_to: int = 0
    """Offsets below may still be worked on by the member that lost the partition."""
    log_id: str = ""
    """Which life of the topics the commit speaks of: a commit outlives a topic that is remade."""
    read_to: int = 0
    """Where the next record is read from: what lies between this and the commit is at work."""
    going_on_s: float = 0.0
    """For how long, at most, that member goes on with what it has dispatched."""


def encode_hint(hint: Hint) -> str:
    """As text for the commit's metadata; without what is seen where that does not fit."""
    text = _text(hint)
    if len(text) <= MAX_HINT_CHARACTERS:
        return text
    return _text(msgspec.structs.replace(hint, out_position=0, seen=SeenState()))


def _text(hint: Hint) -> str:
    return base64.b64encode(zlib.compress(msgspec.msgpack.encode(hint))).decode()


def decode_hint(text: str | None) -> Hint | None:
    """The hint back, or None where there is none or it is not ours."""
    if not text:
        return None
    try:
        return msgspec.msgpack.decode(zlib.decompress(base64.b64decode(text)), type=Hint)
    except (binascii.Error, zlib.error, msgspec.MsgspecError, ValueError):
        return None
