"""The topics of a run: their names, how they are made, checked and removed.

`<prefix>.<run>.<pipeline>.<kind>` hold records, `<prefix>.<run>.control` what roles tell each
other, and `<prefix>.runs` (compacted) which runs there are. All data topics of a run have the same
number of partitions, fixed for its life: partition = n mod P.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from aiokafka import errors
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from rollstream.shared.config import ConfigError
from rollstream.shared.runs import check_run_id

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
_DAY_MS = 24 * 3600 * 1000
_DESCRIBE_S = 30.0
FOR_EVER_MS = -1
RETENTION_MS = {"distilled": _DAY_MS, "dlq": 30 * _DAY_MS, "ledger": FOR_EVER_MS}
"""By kind; every other kind is kept for `DEFAULT_RETENTION_MS`."""
DEFAULT_RETENTION_MS = 7 * _DAY_MS

_PREFIX = re.compile(r"[a-zA-Z0-9_-]{1,63}")
_PART = re.compile(r"[a-z0-9_-]{1,60}")
_RETRIABLE = (
    errors.NotControllerError, errors.RequestTimedOutError, errors.LeaderNotAvailableError,
)


class TopicError(RuntimeError):
    """The broker would not do what was asked, or not in time; one line."""


class TopicSpec(msgspec.Struct, frozen=True):
    """A topic as it must be."""

    name: str
    partitions: int
    retention_ms: int = DEFAULT_RETENTION_MS
    compacted: bool = False


class TopicName(msgspec.Struct, frozen=True):
    """What the name of a data topic says."""

    run: str
    pipeline: str
    kind: str


def data_topic(prefix: str, run: str, pipeline: str, kind: str) -> str:
    """`<prefix>.<run>.<pipeline>.<kind>`.

    Raises ConfigError naming the part that can't be in a topic's name.
    """
    check_prefix(prefix)
    check_run_id(run)
    for field, value in (("pipeline", pipeline), ("topic kind", kind)):
        if not _PART.fullmatch(value):
            raise ConfigError(field, value, "use 1 to 60 of a-z, 0-9, _ and -")
    return f"{prefix}.{run}.{pipeline}.{kind}"


def control_topic(prefix: str, run: str) -> str:
    """`<prefix>.<run>.control`. Raises ConfigError as `data_topic` does."""
    return f"{check_prefix(prefix)}.{check_run_id(run)}.control"


def runs_topic(prefix: str) -> str:
    """`<prefix>.runs`. Raises ConfigError as `data_topic` does."""
    return f"{check_prefix(prefix)}.runs"


def check_prefix(prefix: str) -> str:
    """The prefix back.

    Raises ConfigError where it is not `[a-zA-Z0-9_-]{1,63}`: with a dot in it, one prefix's run
    could be another's topic.
    """
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError("prefix", prefix, "use 1 to 63 of a-z, A-Z, 0-9, _ and -")
    return prefix


def parse_name(prefix: str, topic: str) -> TopicName | None:
    """What a data topic of this prefix is; None for every other topic."""
    head, *parts = topic.split(".")
    return TopicName(*parts) if head == prefix and len(parts) == 3 else None


def run_specs(
    prefix: str, run: str, pipeline: str, kinds: Iterable[str], partitions: int,
    least_retention_ms: int = 0,
) -> list[TopicSpec]:
    """All topics of a run: one a kind, and `control`; none kept for less than the least.

    Raises ConfigError for a bad name or number of partitions.
    """
    if partitions < 1:
        raise ConfigError("--partitions", partitions, "give at least 1")
    return [
        *(
            TopicSpec(
                data_topic(prefix, run, pipeline, kind), partitions,
                _retention_ms(kind, least_retention_ms),
            )
            for kind in kinds
        ),
        TopicSpec(control_topic(prefix, run), 1, FOR_EVER_MS),
    ]


def _retention_ms(kind: str, least_ms: int) -> int:
    default = RETENTION_MS.get(kind, DEFAULT_RETENTION_MS)
    return default if default == FOR_EVER_MS else max(default, least_ms)


def runs_spec(prefix: str) -> TopicSpec:
    """The topic that tells which runs there are."""
    return TopicSpec(runs_topic(prefix), 1, FOR_EVER_MS, compacted=True)


def topic_configs(spec: TopicSpec, replication: int) -> dict[str, str]:
    """The topic's settings on the broker; one replica may be down without stopping writers."""
    return {
        "cleanup.policy": _cleanup(spec),
        "retention.ms": str(spec.retention_ms),
        "retention.bytes": "-1",
        "max.message.bytes": str(MAX_MESSAGE_BYTES),
        "min.insync.replicas": str(max(1, replication - 1)),
    }


def _cleanup(spec: TopicSpec) -> str:
    return "compact" if spec.compacted else "delete"


async def create(
    admin: AIOKafkaAdminClient, specs: Iterable[TopicSpec], *, timeout_s: float = 30.0
) -> list[str]:
    """Make the topics that are missing and wait until every partition has a leader.

    Replication is min(3, brokers). Returns the names that were new. Raises ConfigError where a
    topic exists with another number of partitions, TopicError where the broker refuses or the
    time is over.
    """
    specs = list(specs)
    deadline = time.monotonic() + timeout_s
    replication = min(3, len((await admin.describe_cluster())["brokers"]))
    made: list[str] = []
    missing = specs
    while missing:
        answer: Any = await admin.create_topics(
            [
                NewTopic(s.name, s.partitions, replication,
                         topic_configs=topic_configs(s, replication))
                for s in missing
            ],
            timeout_ms=int(timeout_s * 1000),
        )
        again = set()
        for name, code, *message in answer.topic_errors:
            error = errors.for_code(code)
            if error is errors.NoError:
                made.append(name)
            elif error in _RETRIABLE:
                again.add(name)
            elif error is not errors.TopicAlreadyExistsError:
                why = next((m for m in message if m), error.__name__)
                raise TopicError(f"the broker refuses to create {name}: {why}")
        missing = [s for s in missing if s.name in again]
        if missing:
            await _pause(deadline, f"creating {missing[0].name}", timeout_s)
    while waiting := await _without_leader(admin, specs):
        await _pause(deadline, f"no leader yet for {waiting}", timeout_s)
    await verify(admin, specs)
    return made


async def verify(admin: AIOKafkaAdminClient, specs: Iterable[TopicSpec]) -> None:
    """Nothing where all topics are there as they must be.

    Raises ConfigError for the first that is missing or has another number of partitions.
    """
    there = await _partitions(admin)
    for spec in specs:
        found = there.get(spec.name)
        if found is None:
            raise ConfigError(
                "topic", spec.name,
                "it does not exist: start the run, or create it with its KafkaTopic",
            )
        if len(found) != spec.partitions:
            raise ConfigError(
                "topic", spec.name,
                f"it has {len(found)} partitions, not {spec.partitions}: use --partitions "
                f"{len(found)}, or remove the run and its topics first",
            )


async def check_retention(
    admin: AIOKafkaAdminClient, specs: Iterable[TopicSpec], least_ms: int
) -> None:
    """The topics, as the broker has them, keep records long enough to be read (`delivery.md` 24).

    Raises ConfigError for the first that keeps them for less than `least_ms`, deletes by size, or
    deletes or compacts at all where its records are the run's memory (ledger, control).
    """
    for spec in specs:
        kept_ms, by_size, compacted = await _deletion(admin, spec.name)
        least = FOR_EVER_MS if spec.retention_ms == FOR_EVER_MS else least_ms
        if kept_ms != FOR_EVER_MS and (least == FOR_EVER_MS or kept_ms < least):
            raise ConfigError(
                "retention.ms", f"{kept_ms} of {spec.name}",
                f"set it to {least}: a record must live until it is read",
            )
        if by_size or compacted != spec.compacted:
            raise ConfigError(
                "retention.bytes" if by_size else "cleanup.policy", spec.name,
                f"set retention.bytes=-1, cleanup.policy={_cleanup(spec)}: nothing unread may go",
            )


async def _deletion(admin: AIOKafkaAdminClient, name: str) -> tuple[int, bool, bool]:
    """What the broker says of a topic: kept for so many ms, deleted by size, compacted."""
    asked = [ConfigResource(ConfigResourceType.TOPIC, name)]
    answers: Any = await asyncio.wait_for(admin.describe_configs(asked), _DESCRIBE_S)
    told = {entry[0]: entry[1] for entry in answers[0].resources[0][4]}
    kept_ms = int(told.get("retention.ms", FOR_EVER_MS))
    by_size = int(told.get("retention.bytes", -1)) >= 0
    return kept_ms, by_size, "compact" in told.get("cleanup.policy", "delete")


async def shortest_retention_s(admin: AIOKafkaAdminClient, names: Iterable[str]) -> float | None:
    """For how many seconds the topics keep every record at least, None where it is for ever."""
    kept = [(await _deletion(admin, name))[0] for name in names]
    return min((ms / 1000 for ms in kept if ms != FOR_EVER_MS), default=None)


async def delete(
    admin: AIOKafkaAdminClient, prefix: str, run: str, *, timeout_s: float = 30.0
) -> list[str]:
    """Remove all topics of a run and wait until they are gone; their names.

    Raises TopicError where the broker refuses or the time is over.
    """
    deadline = time.monotonic() + timeout_s
    names = left = list(await list_run_topics(admin, prefix, run))
    while left:
        answer: Any = await admin.delete_topics(left, timeout_ms=int(timeout_s * 1000))
        for name, code in answer.topic_error_codes:
            error = errors.for_code(code)
            gone = error in (errors.NoError, errors.UnknownTopicOrPartitionError)
            if not gone and error not in _RETRIABLE:
                raise TopicError(f"the broker refuses to delete {name}: {error.__name__}")
        if left := list(await list_run_topics(admin, prefix, run)):
            await _pause(deadline, f"deleting {left[0]}", timeout_s)
    return names


async def list_run_topics(
    admin: AIOKafkaAdminClient, prefix: str, run: str | None = None
) -> dict[str, int]:
    """The topics of a run, or of every run of the prefix, with their number of partitions."""
    check_prefix(prefix)
    start = f"{prefix}.{check_run_id(run)}." if run is not None else f"{prefix}."
    return {
        name: len(partitions)
        for name, partitions in sorted((await _partitions(admin)).items())
        if name.startswith(start) and name != runs_topic(prefix)
    }


async def _partitions(admin: AIOKafkaAdminClient) -> dict[str, list[dict]]:
    """Every topic's partitions. Asks for all: the embedded broker creates what it is asked for
    by name."""
    topics = await admin.describe_topics()
    return {t["topic"]: t["partitions"] for t in topics if t["error_code"] == 0}


async def _without_leader(admin: AIOKafkaAdminClient, specs: list[TopicSpec]) -> str | None:
    there = await _partitions(admin)
    for spec in specs:
        partitions = there.get(spec.name)
        if not partitions or any(p["error_code"] or p["leader"] < 0 for p in partitions):
            return spec.name
    return None


async def _pause(deadline: float, doing: str, timeout_s: float) -> None:
    if time.monotonic() > deadline:
        raise TopicError(f"{doing}: not done within {timeout_s:g} s")
    await asyncio.sleep(0.1)
