"""Performs one piece of work: the step with its retries, the output, the dead letters.

Every unit ends in exactly one acknowledged output record, whatever the step does.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec
import structlog

from rollstream.shared.blobs import BlobCorrupt, BlobMissing, Blobs, StoreUnreachable
from rollstream.shared.bus import TooLarge, Writer
from rollstream.shared.codec import Format
from rollstream.shared.dead_letters import (
    FailureRun,
    failed_rollout,
    letter_headers,
    parked_group,
    without_bodies,
)
from rollstream.shared.intake import Work
from rollstream.shared.metrics import Metrics
from rollstream.shared.records import (
    DeadLetter,
    Distilled,
    Failure,
    Group,
    Kind,
    Prompt,
    Rollout,
    Scored,
    Stop,
    group_of,
)
from rollstream.shared.runs import Status
from rollstream.shared.service import RunContext
from rollstream.shared.step import Batcher, Blocked, Each, Step, perform
from rollstream.shared.telemetry import log_record, process_span


class Ended(NamedTuple):
    """Where a unit's output lies in the own output partition."""

    offset: int
    parked: int | None = None
    """The try at which it was parked, None where it was not."""


class Worker:
    """Turns Work into acknowledged output."""

    def __init__(
        self, context: RunContext, step: Step, produces: type, writer: Writer
    ) -> None:
        self._context = context
        self._step = step
        self._produces = produces
        self._writer = writer
        self._call: Each = step.each or step.group or Batcher(step)
        self._failures = FailureRun()
        self._out_topic = context.topic(context.route.output or "")
        self._blobs = Blobs(context.run)
        self._format: Format = "msgpack" if produces is Distilled else "json"
        self._metrics = Metrics(context.run.pipeline, context.route.instance)
        self._log = structlog.get_logger().bind(
            run=context.run.run, stage=context.route.instance
        )

    async def perform(self, work: Work) -> Ended:
        """Do it and write its output.

        Raises Lost, Blocked and TooManyFailures: the attempt at the run is over.
        """
        first = work.inputs[0]
        topic = self._context.topic(self._context.route.input or "")
        with process_span(
            topic, work.partition, first.offset, first.headers, group=self._context.group
        ):
            return await self._perform(work)

    async def _perform(self, work: Work) -> Ended:
        started_s = time.monotonic()
        if work.evidence is not None:
            await self._dead_letter(work, work.evidence)
            if work.k == 0:
                return Ended(-1)
        record = dropped_late(work) if work.late else work.output
        if record is None:
            record = await self._record(work)
        try:
            offset = await self._send(work, record)
        except TooLarge as error:
            record = without_bodies(record, Failure("too_large", str(error)))
            offset = await self._send(work, record)
        parked = None
        if isinstance(record, Group) and record.kind is Kind.PARKED:
            parked = record.redrives
        self._count(record, time.monotonic() - started_s)
        log_record(
            stage=self._context.route.instance, topic=self._out_topic, partition=work.partition,
            offset=offset, run=record.run, group=record.n, sample=work.unit.i,
            duration_s=time.monotonic() - started_s, outcome=_outcome(record),
        )
        return Ended(offset, parked)

    async def _send(self, work: Work, record: Rollout | Group) -> int:
        try:
            return await self._blobs.send(
                self._writer, self._out_topic, work.partition, record,
                key=f"{record.run}/{record.n}", format=self._format,
            )
        except StoreUnreachable as error:
            raise Blocked(str(error)) from error

    def _count(self, record: Rollout | Group, seconds: float) -> None:
        metrics = self._metrics
        metrics.produced(self._out_topic)
        if isinstance(record, Rollout):
            metrics.step(record.stop, seconds)
            metrics.tokens("prompt", record.usage.prompt_tokens)
            metrics.tokens("completion", record.usage.completion_tokens)
            metrics.tokens("cached", record.usage.cached_tokens)
            return
        metrics.step(record.kind, seconds)
        for sample in record.samples:
            if sample.reward is not None and record.kind is Kind.SCORED:
                metrics.reward(record.env.id, sample.reward)

    async def _record(self, work: Work) -> Rollout | Group:
        missing = await self._fetch_bodies(work)
        given = group_of(work.given) if isinstance(work.given, list) else work.given
        if isinstance(given, Prompt) and self._context.status is Status.STOPPED:
            failure = Failure("cancelled", "the run was stopped")
            return failed_rollout(given, work.inputs[0].offset, failure, Stop.CANCELLED)
        missing = missing or (given.failure if isinstance(given, Prompt) else None)
        output = missing or await perform(self._call, given, self._step)
        if not isinstance(output, Failure):
            self._failures.success()
            if not isinstance(output, self._produces) or not isinstance(output, Rollout | Group):
                raise TypeError(f"the step gave {output!r:.100}, not a {self._produces.__name__}")
            if isinstance(output, Rollout):
                output.prompt_offset = work.inputs[0].offset
            elif isinstance(given, Group):
                # Whatever record the step made of it: downstream a later try counts over a park.
                output.redrives = given.redrives
            return output
        self._failures.failure(output)
        if isinstance(given, Prompt):
            stop = Stop.TIMEOUT if output.type == "timeout" else Stop.ERROR
            return failed_rollout(given, work.inputs[0].offset, output, stop)
        await self._dead_letter(work, output)
        return parked_group(self._produces, given, output)

    async def _fetch_bodies(self, work: Work) -> Failure | None:
        """Bring back what the input left in the object store; the failure of what is not there.

        Raises Blocked where the store can't be asked: nothing is known then, and nothing is lost.
        """
        try:
            for record in work.given if isinstance(work.given, list) else [work.given]:
                await self._blobs.fill(record)
        except StoreUnreachable as error:
            raise Blocked(str(error)) from error
        except BlobMissing as error:
            return Failure("blob_missing", str(error))
        except BlobCorrupt as error:
            return Failure("blob_corrupt", str(error))
        return None

    async def _dead_letter(self, work: Work, failure: Failure) -> None:
        """Keep the input's bytes, acknowledged before anything is said downstream.

        Where they are more than the topic takes, the letter says where they lie.
        """
        first = work.inputs[0]
        given = work.given
        letter = DeadLetter(
            run=self._context.run.run, pipeline=self._context.run.pipeline,
            stage=self._context.route.instance, n=max(work.unit.n, -1),
            topic=self._context.topic(self._context.route.input or ""),
            partition=work.partition, offset=first.offset, error=failure, inputs=work.inputs,
            at_ms=int(time.time() * 1000), attempts=self._step.max_attempts,
            redrives=given.redrives if isinstance(given, Group) else 0,
        )
        headers = letter_headers(letter, self._context.group)
        topic, key = self._context.topic("dlq"), f"{letter.run}/{letter.n}"
        try:
            await self._writer.send(topic, work.partition, letter, key=key, headers=headers)
        except TooLarge:
            letter.inputs = [msgspec.structs.replace(one, value=None) for one in letter.inputs]
            await self._writer.send(topic, work.partition, letter, key=key, headers=headers)
        self._metrics.failed(letter.topic, failure.type)
        self._log.warning("dead letter", n=work.unit.n, error=failure.type, detail=failure.message)


def dropped_late(work: Work) -> Scored:
    """The record of a group whose missing samples did not come in time."""
    group = group_of(work.given)
    group.kind, group.reason = Kind.DROPPED, "deadline"
    group.detail = f"{len(work.given)} of {work.k} samples came"
    return group


def _outcome(record: Rollout | Group) -> str:
    return record.stop if isinstance(record, Rollout) else f"{record.kind} {record.reason}".strip()
