"""What becomes of input that can't be processed: kept with its bytes, and its slot closed.

A group whose step keeps failing is parked: one dead letter with all its input bytes, then a
`parked` group record downstream. An undecodable Prompt or Rollout is kept as evidence and its slot
closes as error `undecodable`, as far as its headers tell whose slot it was. Too many failures in a
row stop the run's loop instead: a bad deploy must not drain a topic into the dead letters.
"""

from __future__ import annotations

from collections import deque

import msgspec

from rollstream.shared.codec import Headers, header_int, header_text
from rollstream.shared.records import (
    DeadLetter,
    EnvRef,
    Failure,
    G,
    Group,
    Kind,
    Prompt,
    Rollout,
    Row,
    Stop,
)
from rollstream.shared.runs import RunConfig

FAILURES_IN_A_ROW = 20
RATIO_WINDOW = 100
FAILURES_IN_WINDOW = 50
"""Half of the last hundred: rows that no rubric can score are rarer, a bad deploy is not."""


class TooManyFailures(Exception):
    """So many inputs failed that it is the stage that is broken, not they."""


class FailureRun:
    """Counts failures without a success between them, and among the last hundred inputs."""

    def __init__(self, limit: int = FAILURES_IN_A_ROW) -> None:
        self._limit = limit
        self.length = 0
        self._window: deque[bool] = deque(maxlen=RATIO_WINDOW)

    def success(self) -> None:
        self.length = 0
        self._window.append(False)

    def failure(self, failure: Failure) -> None:
        """Raises TooManyFailures at a limit."""
        self.length += 1
        self._window.append(True)
        failed = sum(self._window)
        if self.length >= self._limit:
            what = f"{self.length} inputs in a row failed"
        elif len(self._window) == RATIO_WINDOW and failed >= FAILURES_IN_WINDOW:
            what = f"{failed} of the last {RATIO_WINDOW} inputs failed"
        else:
            return
        raise TooManyFailures(
            f"{what}, the last with {failure.type}: {failure.message}; fix the stage, nothing was "
            "lost"
        )


MESSAGE_CHARACTERS = 1000


def letter_headers(letter: DeadLetter, group: str) -> Headers:
    """What a dead letter says of itself without its body; `group` is the consumer group."""
    fields = {
        "stage": letter.stage, "group": group, "topic": letter.topic,
        "partition": letter.partition, "offset": letter.offset, "n": letter.n,
        "error.type": letter.error.type,
        "error.message": letter.error.message[:MESSAGE_CHARACTERS],
        "timestamp_ms": letter.inputs[0].timestamp_ms if letter.inputs else 0,
        "at_ms": letter.at_ms, "attempts": letter.attempts, "redrives": letter.redrives,
    }
    return [(f"dlq.{name}", str(value).encode()) for name, value in fields.items()]


def failed_rollout(prompt: Prompt, offset: int, failure: Failure, stop: Stop) -> Rollout:
    """The one Rollout that a Prompt ends in when it could not be generated."""
    return Rollout(
        run=prompt.run, pipeline=prompt.pipeline, n=prompt.n, i=prompt.i, k=prompt.k,
        epoch=prompt.epoch, row_index=prompt.row_index, env=prompt.env, row=prompt.row,
        group_overrides=prompt.group_overrides, prompt_offset=offset, stop=stop, error=failure,
    )


def slot_rollout(run: RunConfig, headers: Headers, n: int, reason: str) -> Rollout:
    """The Rollout that closes an undecodable record's slot."""
    return Rollout(
        run=run.run, pipeline=run.pipeline, n=n, i=header_int(headers, "rs-sample") or 0,
        k=header_int(headers, "rs-k") or run.group_size, env=_env(headers), row=Row(prompt=[]),
        stop=Stop.ERROR, error=Failure("undecodable", reason),
    )


def parked_stub(kind: type[G], run: RunConfig, headers: Headers, n: int, reason: str) -> G:
    """The `parked` record in the place of a group record that can't be decoded."""
    return kind(
        run=run.run, pipeline=run.pipeline, n=n, k=header_int(headers, "rs-k") or run.group_size,
        env=_env(headers), row=Row(prompt=[]), kind=Kind.PARKED, reason="undecodable",
        detail=reason,
    )


def _env(headers: Headers) -> EnvRef:
    return EnvRef(id=header_text(headers, "rs-env") or "")


def without_bodies(record: Rollout | Group, failure: Failure) -> Rollout | Group:
    """What is left of an output that no topic takes: an errored rollout, a dropped group."""
    if isinstance(record, Rollout):
        return msgspec.structs.replace(
            record, stop=Stop.ERROR, error=failure, sequences=[], completion=[], state={},
            row=Row(prompt=[]),
        )
    return msgspec.structs.replace(
        record, kind=Kind.DROPPED, reason=failure.type, detail=failure.message, samples=[],
        row=Row(prompt=[]),
    )


def parked_group(kind: type[G], source: Rollout | Group, failure: Failure) -> G:
    """The `parked` record that goes downstream in a group's place; its bodies stay behind."""
    return kind(
        run=source.run, pipeline=source.pipeline, n=source.n, k=source.k, epoch=source.epoch,
        row_index=source.row_index, env=source.env, row=source.row,
        group_overrides=source.group_overrides, kind=Kind.PARKED, reason=failure.type,
        detail=failure.message, redrives=source.redrives if isinstance(source, Group) else 0,
    )
