"""Claim check: what is too big for a topic lies in an object store, the record says where.

Above the run's `blobs.above_bytes` the bodies of a record (row, completions, sequences, samples) go
to an object, written before the record; what routing, assembly and the books need stays in it. An
object's name holds the hash of its content: a retry writes the same, nobody overwrites another's,
and what is read is checked. Objects live as long as the run, longer than any of its topics.

    file:///data/blobs    s3://bucket/path    gs://bucket/path    (one library, obstore)

Credentials come from a process's own environment, never from a run or a record.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import obstore
from obstore.exceptions import BaseError, NotFoundError

from rollstream.shared.bus import Writer
from rollstream.shared.codec import Format, Headers, encode
from rollstream.shared.config import ConfigError
from rollstream.shared.records import (
    BlobRef,
    Group,
    Message,
    Prompt,
    Rollout,
    Row,
    Sample,
    Sequence,
)
from rollstream.shared.runs import RunConfig

LATE_PAUSES_S = (0.1, 0.4, 1.0, 2.0, 4.0, 8.0, 14.0)
"""An object may be seen later than the record that names it: about 30 s of patience."""
STORE_S = 60.0
SCHEMES = ("file", "s3", "gs")

Record = Prompt | Rollout | Group


class BlobMissing(Exception):
    """The object is not there, however long one waits."""


class BlobCorrupt(Exception):
    """The object is not what was written."""


class StoreUnreachable(Exception):
    """The store does not answer, or refuses us: nothing is known of the object."""


class _Bodies(msgspec.Struct):
    """What is left out of a record; empty where the record's kind has no such field."""

    row: Row
    completion: list[Message] = []
    sequences: list[Sequence] = []
    state: dict[str, Any] = {}
    samples: list[Sample] = []


def _bodies(record: Record) -> _Bodies:
    if isinstance(record, Rollout):
        return _Bodies(record.row, record.completion, record.sequences, record.state)
    return _Bodies(record.row, samples=record.samples if isinstance(record, Group) else [])


def _without(record: Record, ref: BlobRef) -> Record:
    fields: dict[str, Any] = {"row": Row(prompt=[]), "bodies": ref}
    if isinstance(record, Rollout):
        fields |= {"completion": [], "sequences": [], "state": {}}
    elif isinstance(record, Group):
        fields |= {"samples": []}
    return msgspec.structs.replace(record, **fields)


def _fill(record: Record, bodies: _Bodies) -> None:
    record.row, record.bodies = bodies.row, None
    if isinstance(record, Rollout):
        record.completion, record.sequences = bodies.completion, bodies.sequences
        record.state = bodies.state
    elif isinstance(record, Group):
        record.samples = bodies.samples


class Object(NamedTuple):
    """An object of a run."""

    uri: str
    size_bytes: int
    age_s: float


class Blobs:
    """The objects of one run; without a store nothing is ever left out of a record."""

    def __init__(self, run: RunConfig) -> None:
        self._above_bytes = run.blobs.above_bytes
        self._root = run.blobs.uri.rstrip("/")
        self._folder = f"{run.prefix}/{run.run}"
        self._log_id = run.log_id
        self._store = open_store(self._root) if self._root else None

    async def send(
        self, writer: Writer, topic: str, partition: int, record: Record, *, key: str,
        format: Format = "json", headers: Headers | None = None,
    ) -> int:
        """Write the record, its bodies to the store before it where it is big; its offset.

        Raises what `Writer.send` raises, and StoreUnreachable.
        """
        body, own_headers = encode(record, format)
        if self._store is not None and len(body) > self._above_bytes and record.bodies is None:
            ref = await self._put(topic.rpartition(".")[2], record)
            body, _ = encode(_without(record, ref), format)
        # The headers are the whole record's: its policy version is in the bodies.
        return await writer.send_bytes(
            topic, partition, key.encode(), body, own_headers + (headers or [])
        )

    async def fill(self, record: Record) -> None:
        """Bring the record's bodies back, in place.

        Raises BlobMissing, BlobCorrupt, StoreUnreachable.
        """
        if record.bodies is None:
            return
        content = await self._get(record.bodies)
        try:
            _fill(record, msgspec.msgpack.decode(content, type=_Bodies))
        except msgspec.MsgspecError as error:
            raise BlobCorrupt(f"{record.bodies.uri} can't be read: {error}") from error

    async def _put(self, kind: str, record: Record) -> BlobRef:
        content = msgspec.msgpack.encode(_bodies(record))
        digest = hashlib.sha256(content).hexdigest()
        sample = f"-{record.i}" if isinstance(record, Prompt | Rollout) else ""
        path = f"{self._folder}/{self._log_id}/{kind}/{record.n}{sample}-{digest[:16]}"
        try:
            async with asyncio.timeout(STORE_S):
                await obstore.put_async(self._store, path, content)  # type: ignore[arg-type]
        except (BaseError, TimeoutError, OSError) as error:
            raise StoreUnreachable(f"could not write {self._root}/{path}: {_why(error)}") from error
        return BlobRef(f"{self._root}/{path}", digest, len(content))

    async def _get(self, ref: BlobRef) -> bytes:
        if self._store is None or not ref.uri.startswith(self._root + "/"):
            raise BlobMissing(f"{ref.uri} is not in this run's store ({self._root or 'none'})")
        path = ref.uri.removeprefix(self._root + "/")
        for pause_s in (*LATE_PAUSES_S, None):
            try:
                async with asyncio.timeout(STORE_S):
                    found = await obstore.get_async(self._store, path)
                    content = bytes(await found.bytes_async())
            except (NotFoundError, FileNotFoundError) as error:
                if not self._there():
                    raise StoreUnreachable(f"{self._root} is not there: is it mounted?") from error
                if pause_s is None:
                    raise BlobMissing(f"{ref.uri} is not there") from error
                await asyncio.sleep(pause_s)
                continue
            except (BaseError, TimeoutError, OSError) as error:
                raise StoreUnreachable(f"could not read {ref.uri}: {_why(error)}") from error
            if len(content) != ref.size_bytes or hashlib.sha256(content).hexdigest() != ref.sha256:
                raise BlobCorrupt(f"{ref.uri} is not what was written: {len(content)} bytes, "
                                  f"sha256 {hashlib.sha256(content).hexdigest()[:12]}")
            return content
        raise AssertionError("unreachable")

    def _there(self) -> bool:
        """A folder that is gone, e.g. not mounted, is no folder without objects."""
        parts = urlsplit(self._root)
        return parts.scheme != "file" or Path(parts.path).is_dir()

    async def objects(self) -> AsyncIterator[Object]:
        """Everything that any log of this run ever put there. Raises StoreUnreachable."""
        if self._store is None:
            return
        try:
            for chunk in await asyncio.to_thread(
                lambda: list(obstore.list(self._store, prefix=self._folder))  # type: ignore[arg-type]
            ):
                for one in chunk:
                    age_s = _age_s(one["last_modified"])
                    yield Object(f"{self._root}/{one['path']}", one["size"], age_s)
        except (BaseError, OSError) as error:
            raise StoreUnreachable(f"could not list {self._root}: {_why(error)}") from error

    async def remove(self, uris: list[str]) -> None:
        """Remove objects. Raises StoreUnreachable."""
        paths = [uri.removeprefix(self._root + "/") for uri in uris]
        try:
            if paths and self._store is not None:
                async with asyncio.timeout(STORE_S * 10):
                    await obstore.delete_async(self._store, paths)
        except (BaseError, TimeoutError, OSError) as error:
            raise StoreUnreachable(f"could not remove from {self._root}: {_why(error)}") from error


def open_store(uri: str) -> Any:
    """The store behind a URI; it is not asked yet. Raises ConfigError."""
    parts = urlsplit(uri)
    if "@" in parts.netloc:
        # Not shown: a run's record is no place for a secret, nor is an error message.
        raise ConfigError("blobs.uri", "?", "give file:///folder, or s3://bucket without a secret")
    if parts.scheme == "file" and parts.netloc:
        raise ConfigError("blobs.uri", uri, "give file:///folder, with three slashes")
    if parts.scheme not in SCHEMES or not (parts.netloc or parts.path.strip("/")):
        raise ConfigError("blobs.uri", uri, "give file:///folder, s3://bucket or gs://bucket/path")
    try:
        if parts.scheme == "file":
            return obstore.store.LocalStore(parts.path, mkdir=True)
        return obstore.store.from_url(uri)
    except (BaseError, ValueError, OSError) as error:
        raise ConfigError("blobs.uri", uri, f"it can't be used: {_why(error)}") from error


def _age_s(modified: datetime) -> float:
    return (datetime.now(UTC) - modified).total_seconds()


def _why(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]
