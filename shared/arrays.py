"""Numbers on the wire: arrays as packed little-endian bytes, never as lists of Python floats.

In JSON the bytes become base64 text; in msgpack they stay bytes. Sizes are measured in
`bench/`: 8,192 tokens with logprobs cost 87 KB here and 214 KB as JSON lists.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

DType = Literal["int32", "uint8", "float16", "float32"]
_WIRE: dict[str, str] = {"int32": "<i4", "uint8": "u1", "float16": "<f2", "float32": "<f4"}


class Packed(msgspec.Struct, frozen=True):
    """An array of any shape as its dtype, shape and little-endian bytes, C order."""

    dtype: DType
    shape: list[int]
    data: bytes

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0


def pack(values: object, dtype: DType) -> Packed:
    """Pack a list or array.

    Raises ValueError on NaN or infinity: no such number ever leaves a stage.
    """
    array = np.ascontiguousarray(values, dtype=_WIRE[dtype])
    if dtype.startswith("float") and not np.isfinite(array).all():
        raise ValueError(f"cannot pack a {dtype} array that holds NaN or infinity")
    return Packed(dtype=dtype, shape=list(array.shape), data=array.tobytes())


def unpack(packed: Packed) -> np.ndarray:
    """The array back, read-only, without a copy.

    Raises ValueError where the bytes do not fill the shape.
    """
    array = np.frombuffer(packed.data, dtype=_WIRE[packed.dtype])
    return array.reshape(packed.shape)
