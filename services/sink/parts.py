"""Parts: the files that hold a leaf's decisions, and from which everything else is made anew.

A part is `parts/<leaf>/<log_id>/<partition>-<start offset>.jsonl`: a header line, then a line per
decided group. It appears whole or not at all, once and for ever: written aside, synced, then
linked under its name, which fails where the name exists. The parts of a partition form a chain from
offset 0, each starting where the one before ends; a sink goes on at the end of the chain, whatever
was committed (`delivery.md` rule 18).

Parts of other log_ids are from earlier lives of the run's topics (the embedded broker forgets all
when it ends): they say which groups have ended, and hold their data.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from rollstream.services.sink.decide import Decision
from rollstream.shared.bus import Lost
from rollstream.shared.durable import make_folder, sync_folder
from rollstream.shared.records import Distilled, Ended, Outcome, Scored

Record = Scored | Distilled
K = TypeVar("K")


class PartError(Exception):
    """A part that can't be trusted: torn, foreign or damaged. Nothing is skipped silently."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """A part's first line: what it covers."""

    v: int = 1
    topic: str
    log_id: str
    partition: int
    start: int
    end: int
    """The offset after the last record that was read for it."""
    count: int
    """Lines that follow."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """How one group ended."""

    n: int
    outcome: Outcome
    reason: str = ""
    reward_sum: float = 0.0
    reward_count: int = 0
    redrives: int = 0

    def ended(self, leaf: str) -> Ended:
        return Ended(
            n=self.n, leaf=leaf, outcome=self.outcome, reason=self.reason,
            reward_sum=self.reward_sum, reward_count=self.reward_count, redrives=self.redrives,
        )


class FullLine(Line, frozen=True, kw_only=True):
    """The same with the group itself, as the record that the sink read."""

    group: Record | None = None


L = TypeVar("L", bound=Line)


class PartFile(NamedTuple):
    """One part and its header."""

    path: Path
    header: Header


class Folder:
    """The parts of one leaf of one run.

    `keep_dropped`: whether a dropped group's record is kept as well.
    """

    def __init__(
        self, out: Path, leaf: str, *, topic: str, log_id: str, keep_dropped: bool = False
    ) -> None:
        self.root = out / "parts" / leaf
        self.leaf = leaf
        self._topic = topic
        self._log_id = log_id
        self.keep_dropped = keep_dropped

    @property
    def _here(self) -> Path:
        return self.root / self._log_id

    def write(
        self, partition: int, start: int, end: int, decisions: list[Decision]
    ) -> PartFile:
        """Put a part in its place, synced to the disk.

        Raises Lost where a part with this start exists, or where its unfinished file was taken
        away: another member owns the partition now.
        """
        header = Header(
            topic=self._topic, log_id=self._log_id, partition=partition, start=start, end=end,
            count=len(decisions),
        )
        make_folder(self._here)
        path = self._here / f"{partition}-{start:020d}.jsonl"
        aside = self._here / f".{path.stem}.{secrets.token_hex(4)}.tmp"
        try:
            with aside.open("xb") as file:
                file.write(msgspec.json.encode(header) + b"\n")
                for decision in decisions:
                    file.write(self._line(decision) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.link(aside, path)
        except (FileExistsError, FileNotFoundError) as error:
            raise Lost(f"{path} is not ours to write any more") from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                aside.unlink()
        sync_folder(self._here)
        return PartFile(path, header)

    def _line(self, decision: Decision) -> bytes:
        ended = decision.ended(self.leaf)
        keep = decision.outcome is Outcome.DELIVERED or (
            self.keep_dropped and decision.outcome is Outcome.DROPPED
        )
        group = decision.group if keep else None
        return msgspec.json.encode(FullLine(
            n=ended.n, outcome=ended.outcome, reason=ended.reason, reward_sum=ended.reward_sum,
            reward_count=ended.reward_count, redrives=ended.redrives,
            group=group if isinstance(group, Scored | Distilled) else None,
        ))

    def take_over(self, partition: int) -> None:
        """Remove what an earlier owner of the partition left unfinished; it can't finish it now."""
        for aside in self._here.glob(f".{partition}-*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                aside.unlink()

    def chain(self, partition: int, start: int = 0) -> Iterator[PartFile]:
        """The partition's parts of this log in order, from the one that starts at `start`.

        Raises PartError where a part is not what it says or where one lies outside of the chain.
        """
        names = sorted(self._here.glob(f"{partition}-*.jsonl"))
        position = start
        for path in names:
            if _start_of(path) < start:
                continue
            header = self._header(path, partition)
            if header.start != position:
                raise PartError(path, f"starts at {header.start}, the part before ends at "
                                f"{position}: a part is missing or was added")
            position = header.end
            yield PartFile(path, header)

    def _header(self, path: Path, partition: int) -> Header:
        with path.open("rb") as file:
            header = _decode(path, file.readline(), Header)
        wanted = (self._topic, self._log_id, partition, _start_of(path))
        if (header.topic, header.log_id, header.partition, header.start) != wanted:
            raise PartError(path, f"belongs to {header.topic}[{header.partition}] of log "
                            f"{header.log_id} at {header.start}: it is not this run's")
        if header.end <= header.start:
            raise PartError(path, f"ends at {header.end}, before its start")
        return header

    def earlier(self) -> list[PartFile]:
        """The parts of the run's earlier logs, by log and name.

        Raises PartError where one is damaged or of another run.
        """
        found: list[PartFile] = []
        for folder in sorted(self.root.glob("*/")):
            if folder.name == self._log_id:
                continue
            for path in sorted(folder.glob("*.jsonl")):
                with path.open("rb") as file:
                    header = _decode(path, file.readline(), Header)
                if header.topic != self._topic:
                    raise PartError(path, f"belongs to {header.topic}, not to {self._topic}: "
                                    "give each run its own folder")
                found.append(PartFile(path, header))
        return found

    def restored(self) -> dict[int, Line]:
        """How groups ended in earlier logs: n to its first end. Parked groups are not among them.

        Raises PartError.
        """
        ends: dict[int, Line] = {}
        for part in self.earlier():
            for line in read_lines(part, Line):
                if line.outcome is not Outcome.PARKED:
                    ends.setdefault(line.n, line)
        return ends

    def everything(self, partitions: int) -> list[PartFile]:
        """All parts: those of earlier logs, then this log's chains. Raises PartError."""
        return self.earlier() + [
            part for partition in range(partitions) for part in self.chain(partition)
        ]


def read_lines(part: PartFile, kind: type[L]) -> Iterator[L]:
    """A part's lines, checked against its header.

    Raises PartError where it is torn or damaged.
    """
    return (line for line, _ in _located(part, kind))


def _located(part: PartFile, kind: type[L]) -> Iterator[tuple[L, int]]:
    """Lines and the byte at which each starts."""
    count = 0
    with part.path.open("rb") as file:
        offset = len(file.readline())
        for line in file:
            if not line.endswith(b"\n"):
                raise PartError(part.path, "its last line is torn")
            yield _decode(part.path, line, kind), offset
            offset += len(line)
            count += 1
    if count != part.header.count:
        raise PartError(part.path, f"holds {count} groups, its header says {part.header.count}")


def _start_of(path: Path) -> int:
    start = path.stem.partition("-")[2]
    if not start.isdigit():
        raise PartError(path, "is not named <partition>-<start offset>.jsonl")
    return int(start)


def _decode(path: Path, line: bytes, kind: type[K]) -> K:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise PartError(path, f"is torn or damaged ({error})") from error


def in_order(parts: list[PartFile], outcomes: frozenset[Outcome]) -> Iterator[FullLine]:
    """The lines of ended groups by group number, each group once: its first end counts.

    Only lines with one of `outcomes` come. Holds an index of all groups in memory, about a hundred
    bytes each, and one line at a time. Raises PartError.
    """
    ended: set[int] = set()
    index: list[tuple[int, int, int]] = []
    for at, part in enumerate(parts):
        for line, offset in _located(part, Line):
            if line.outcome is Outcome.PARKED or line.n in ended:
                continue
            ended.add(line.n)
            if line.outcome in outcomes:
                index.append((line.n, at, offset))
    for _, at, offset in sorted(index):
        with parts[at].path.open("rb") as file:
            file.seek(offset)
            yield _decode(parts[at].path, file.readline(), FullLine)
