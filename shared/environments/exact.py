"""Does a value survive our wire unchanged? Values of user code are Any: ask, don't hope."""

from __future__ import annotations

from typing import Any

import msgspec


def survives(value: object) -> bool:
    """True if JSON gives back an equal value of equal types, and msgpack takes it.

    False for tuples, sets, integer keys, NaN, infinity, bytes, dates, numpy numbers, integers
    beyond 64 bits, models, handles and whatever else would be refused or silently changed.
    """
    try:
        msgspec.msgpack.encode(value)
        return same(value, msgspec.json.decode(msgspec.json.encode(value)))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError):
        return False


def same(a: Any, b: Any) -> bool:
    """Equal, and of equal types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b
