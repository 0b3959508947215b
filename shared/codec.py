"""Records to bytes and back, with the headers that let taps and routers skip the body.

JSON by default, msgpack where a topic says so; the `content-type` header decides how to read.
msgpack values above 32 KiB are compressed here, by zstd (`content-encoding`), never by the client:
the broker's size check looks at what we send.
"""

from __future__ import annotations

import contextlib
from typing import Literal, TypeVar

import msgspec
import zstandard

from rollstream.shared.records import SCHEMA_VERSION, Group, Prompt, Record, Rollout

Format = Literal["json", "msgpack"]
Headers = list[tuple[str, bytes]]
T = TypeVar("T")

COMPRESS_ABOVE_BYTES = 32 * 1024
_CONTENT_TYPE: dict[Format, bytes] = {
    "json": b"application/json",
    "msgpack": b"application/msgpack",
}

_json_encoder = msgspec.json.Encoder()
_msgpack_encoder = msgspec.msgpack.Encoder()
_json_decoder = msgspec.json.Decoder(Record)
_msgpack_decoder = msgspec.msgpack.Decoder(Record)


class Undecodable(ValueError):
    """These bytes are no record that this version knows."""


def encode(record: msgspec.Struct, format: Format = "json") -> tuple[bytes, Headers]:
    """The record's bytes and its headers."""
    headers: Headers = [("content-type", _CONTENT_TYPE[format])]
    body = _json_encoder.encode(record) if format == "json" else _msgpack_encoder.encode(record)
    if format == "msgpack" and len(body) > COMPRESS_ABOVE_BYTES:
        body = zstandard.compress(body)
        headers.append(("content-encoding", b"zstd"))
    return body, headers + routing_headers(record)


def routing_headers(record: msgspec.Struct) -> Headers:
    """Type, schema, run, pipeline, group, sample, env and policy version, as far as it has them."""
    fields: dict[str, object] = {
        "rs-type": type(record).__struct_config__.tag,
        "rs-schema": SCHEMA_VERSION,
    }
    if isinstance(record, Prompt | Rollout | Group):
        fields |= {
            "rs-run": record.run, "rs-pipeline": record.pipeline,
            "rs-group": record.n, "rs-k": record.k, "rs-env": record.env.id,
        }
    if isinstance(record, Prompt | Rollout):
        fields["rs-sample"] = record.i
    if isinstance(record, Group):
        fields["rs-kind"] = record.kind
        if record.redrives:
            fields["rs-redrives"] = record.redrives
        if (version := record.oldest_version) is not None:
            fields["rs-policy-version"] = version
    return [(key, str(value).encode()) for key, value in fields.items()]


def decode(body: bytes | None, headers: Headers) -> Record:
    """The record that `encode` wrote.

    Raises Undecodable with the reason, never anything else.
    """
    if body is None:
        raise Undecodable("the record has no value")
    names = dict(headers)
    try:
        if names.get("content-encoding") == b"zstd":
            body = zstandard.decompress(body)
        if names.get("content-type") == _CONTENT_TYPE["msgpack"]:
            return _msgpack_decoder.decode(body)
        return _json_decoder.decode(body)
    except (msgspec.MsgspecError, zstandard.ZstdError, UnicodeDecodeError) as error:
        raise Undecodable(str(error)) from error


def decode_as(kind: type[T], body: bytes | None) -> T:
    """A JSON body as one kind of Struct that is not a run's Record (e.g. the runs topic's).

    Raises Undecodable.
    """
    try:
        return msgspec.json.decode(body or b"", type=kind)
    except msgspec.MsgspecError as error:
        raise Undecodable(str(error)) from error


def header_int(headers: Headers, name: str) -> int | None:
    """An integer header, or None where it is missing or no number."""
    for key, value in headers:
        if key == name:
            with contextlib.suppress(ValueError):
                return int(value)
    return None


def header_text(headers: Headers, name: str) -> str | None:
    """A text header, or None where it is missing."""
    for key, value in headers:
        if key == name:
            return value.decode(errors="replace")
    return None
