"""`batches.jsonl`: offered and acknowledged batches, kept beside the topics.

An embedded broker forgets everything when it ends; this file, synced before the control topic and
the ledger are written, tells the next start which groups the trainer has had.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from rollstream.services.sink.parts import PartError
from rollstream.shared.durable import make_folder, sync_folder
from rollstream.shared.records import Ended


class BatchLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line: a batch was offered, or acknowledged."""

    log_id: str
    batch_id: int
    kind: Literal["offered", "acked"]
    ends: list[Ended] = []
    """Offered: how its groups end once it is acknowledged."""


def append(path: Path, line: BatchLine) -> None:
    """Add a line, synced to the disk."""
    new = not path.exists()
    make_folder(path.parent)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if new:
        sync_folder(path.parent)


def read(path: Path) -> list[BatchLine]:
    """All lines; a last one that was cut off in the middle was never acted upon and is removed.

    Raises PartError for a damaged line.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    try:
        return [msgspec.json.decode(line, type=BatchLine) for line in whole.splitlines()]
    except msgspec.MsgspecError as error:
        raise PartError(path, f"is damaged ({error})") from error


def delivered_before(lines: list[BatchLine], log_id: str) -> list[Ended]:
    """The ends of groups that the trainer acknowledged in earlier logs of the run."""
    acked = {(line.log_id, line.batch_id) for line in lines if line.kind == "acked"}
    # An id that was never handed out is offered anew: its last line counts.
    offered = {(line.log_id, line.batch_id): line for line in lines if line.kind == "offered"}
    return [
        end for key, line in offered.items()
        if line.log_id != log_id and key in acked
        for end in line.ends
    ]


def batches_before(lines: list[BatchLine], log_id: str) -> int:
    """How many batches were acknowledged in earlier logs."""
    return len({
        (line.log_id, line.batch_id)
        for line in lines if line.kind == "acked" and line.log_id != log_id
    })
