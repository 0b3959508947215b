"""Claim check: what is too big for a topic lies in an object store, the record says where.

Above the run's `blobs.above_bytes` the bodies of a record (row, completions, sequences, samples) go
to an object, written before the record; what routing, assembly and the books need stays in it. An
object's name holds the hash of its content: a retry writes the same, nobody overwrites another's,
and what is read is checked. It is encoded as its record is, so that nothing comes back otherwise.
Objects live as long as the run, longer than any of its topics.

    file:///data/blobs    s3://bucket/path    gs://bucket/path    (one library, obstore)

Credentials come from a process's own environment, never from a run or a record.
"""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec
import obstore
from obstore.exceptions import BaseError

from rollstream.shared.bus import Writer
from rollstream.shared.codec import Format, Headers, encode
from rollstream.shared.config import ConfigError
from rollstream.shared.durable import replacing
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
LIST_S = 600.0
REMOVED_AT_ONCE = 1000
FAULTS = (BaseError, TimeoutError, OSError, ValueError)
"""What a store, or the settings of this process for it, can come up with."""
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
        self._local = local_folder(self._root)
        self._folder = f"{run.prefix}/{run.run}"
        self._log_id = run.log_id
        self._opened: Any = None

    async def send(
        self, writer: Writer, topic: str, partition: int, record: Record, *, key: str,
        format: Format = "json", headers: Headers | None = None,
    ) -> int:
        """Write the record, its bodies to the store before it where it is big; its offset.

        Raises what `Writer.send` raises, and StoreUnreachable.
        """
        body, own_headers = encode(record, format)
        if self._root and len(body) > self._above_bytes and record.bodies is None:
            ref = await self._put(topic.rpartition(".")[2], record, format)
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
        coding = msgspec.json if record.bodies.uri.endswith(".json") else msgspec.msgpack
        try:
            _fill(record, coding.decode(content, type=_Bodies))
        except msgspec.MsgspecError as error:
            raise BlobCorrupt(f"{record.bodies.uri} can't be read: {error}") from error

    async def _put(self, kind: str, record: Record, format: Format) -> BlobRef:
        coding = msgspec.json if format == "json" else msgspec.msgpack
        content = coding.encode(_bodies(record))
        digest = hashlib.sha256(content).hexdigest()
        sample = f"-{record.i}" if isinstance(record, Prompt | Rollout) else ""
        name = f"{record.n}{sample}-{digest[:16]}.{format}"
        path = f"{self._folder}/{self._log_id}/{kind}/{name}"
        try:
            async with asyncio.timeout(STORE_S):
                if self._local is not None:
                    await asyncio.to_thread(_write, self._local / path, content)
                else:
                    # In one request: no half an upload is left behind, nor paid for.
                    await obstore.put_async(self._store(), path, content, use_multipart=False)
        except FAULTS as error:
            raise StoreUnreachable(f"could not write {self._root}/{path}: {_why(error)}") from error
        return BlobRef(f"{self._root}/{path}", digest, len(content))

    async def _get(self, ref: BlobRef) -> bytes:
        if not self._root or not ref.uri.startswith(f"{self._root}/{self._folder}/"):
            raise BlobMissing(f"{ref.uri} is not in this run's store ({self._root or 'none'})")
        path = ref.uri.removeprefix(self._root + "/")
        for pause_s in (*LATE_PAUSES_S, None):
            try:
                async with asyncio.timeout(STORE_S):
                    found = await obstore.get_async(self._store(), path)
                    content = bytes(await found.bytes_async())
            except FileNotFoundError as error:
                if not self._there():
                    raise StoreUnreachable(
                        f"{self._root}/{self._folder} is not here: is it mounted and shared?"
                    ) from error
                if pause_s is None:
                    raise BlobMissing(f"{ref.uri} is not there") from error
                await asyncio.sleep(pause_s)
                continue
            except FAULTS as error:
                raise StoreUnreachable(f"could not read {ref.uri}: {_why(error)}") from error
            if len(content) != ref.size_bytes or hashlib.sha256(content).hexdigest() != ref.sha256:
                raise BlobCorrupt(f"{ref.uri} is not what was written: {len(content)} bytes, "
                                  f"sha256 {hashlib.sha256(content).hexdigest()[:12]}")
            return content
        raise AssertionError("unreachable")

    def _there(self) -> bool:
        """Whether the run's folder is: where it is not mounted no object is missing."""
        return self._local is None or (self._local / self._folder).is_dir()

    def _store(self) -> Any:
        """Opened at the first need: a run whose records are small asks no store for anything."""
        if self._opened is None:
            self._opened = _open(self._root, self._local)
        return self._opened

    async def objects(self) -> list[Object]:
        """Everything that any log of this run ever put there. Raises StoreUnreachable."""
        if not self._root or not self._there():
            return []
        found: list[Object] = []
        try:
            async with asyncio.timeout(LIST_S):
                async for chunk in obstore.list(self._store(), prefix=self._folder):
                    for one in chunk:
                        age_s = _age_s(one["last_modified"])
                        found.append(Object(f"{self._root}/{one['path']}", one["size"], age_s))
        except FileNotFoundError:
            return []  # the bucket itself is gone
        except FAULTS as error:
            raise StoreUnreachable(f"could not list {self._root}: {_why(error)}") from error
        return found

    async def remove(self, uris: list[str]) -> None:
        """Remove objects. Raises StoreUnreachable."""
        try:
            async with asyncio.timeout(LIST_S):
                for first in range(0, len(uris), REMOVED_AT_ONCE):
                    some = uris[first : first + REMOVED_AT_ONCE]
                    paths = [uri.removeprefix(self._root + "/") for uri in some]
                    await obstore.delete_async(self._store(), paths)
        except FAULTS as error:
            raise StoreUnreachable(f"could not remove from {self._root}: {_why(error)}") from error


def check_uri(uri: str) -> None:
    """Whether it names a store, as far as that is seen from anywhere. Raises ConfigError."""
    parts = urlsplit(uri)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            "blobs.uri", "?", "leave credentials and options out: they are each process's own"
        )
    path = parts.path.strip("/")
    named = path and not parts.netloc if parts.scheme == "file" else parts.netloc
    if parts.scheme not in SCHEMES or not named:
        raise ConfigError("blobs.uri", uri, "give file:///folder, s3://bucket or gs://bucket/path")


def local_folder(uri: str) -> Path | None:
    """The folder of a file:// URI, None for any other."""
    parts = urlsplit(uri)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _open(uri: str, local: Path | None) -> Any:
    if local is None:
        return obstore.store.from_url(uri)
    if not local.is_dir():
        raise FileNotFoundError(f"no folder {local}")
    return obstore.store.LocalStore(local, automatic_cleanup=True)


def _write(path: Path, content: bytes) -> None:
    # obstore's own local store renames without a sync: a power cut would leave the record alone.
    with replacing(path) as aside:
        aside.write_bytes(content)


def _age_s(modified: datetime) -> float:
    return (datetime.now(UTC) - modified).total_seconds()


def _why(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]
