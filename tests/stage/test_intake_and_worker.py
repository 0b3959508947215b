"""From an input record to an acknowledged output, whatever is wrong with the record or the step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from making import run

from rollstream.shared.bus import Bus, TooLarge
from rollstream.shared.codec import decode, encode
from rollstream.shared.dead_letters import FAILURES_IN_A_ROW, TooManyFailures
from rollstream.shared.intake import Intake, Work
from rollstream.shared.partition import Partition
from rollstream.shared.records import (
    DeadLetter,
    Distilled,
    EnvRef,
    Kind,
    Prompt,
    Rollout,
    Row,
    Scored,
    Stop,
    group_of,
    passed_on,
)
from rollstream.shared.runs import RunConfig, Status
from rollstream.shared.seen import Unit
from rollstream.shared.service import RunContext
from rollstream.shared.step import Blocked, Step
from rollstream.shared.worker import Worker

ROW = Row(prompt=[{"role": "user", "content": "?"}])


@dataclass
class FakeWriter:
    """Remembers what was sent; a topic in `full` takes nothing big."""

    sent: list[tuple[str, int, Any]] = field(default_factory=list)
    full_above_bytes: int = 1 << 30

    async def send(self, topic: str, partition: int, record: Any, **_: Any) -> int:
        return await self.send_bytes(topic, partition, b"", *encode(record))

    async def send_bytes(
        self, topic: str, partition: int, key: bytes, body: bytes, headers: Any
    ) -> int:
        if len(body) > self.full_above_bytes:
            raise TooLarge("too big")
        self.sent.append((topic.rpartition(".")[2], partition, decode(body, headers)))
        return len(self.sent) - 1

    def to(self, kind: str) -> list[Any]:
        return [record for topic, _, record in self.sent if topic == kind]


@dataclass
class FakeRecord:
    """A consumed record."""

    offset: int
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    partition: int = 1
    timestamp: int = 1000
    key: bytes = b"r/1"


class Line:
    """One stage without a broker: read a record, do what it makes, look at what was written."""

    def __init__(self, instance: str, step: Step, produces: str, config: RunConfig | None = None):
        config = config or run(partitions=4)
        self.context = RunContext(config, config.stage(instance), Bus("", "test"))
        self.writer = FakeWriter()
        self.intake = Intake(self.context, step, produces)
        self.machine = Partition(4)
        self.worker = Worker(self.context, step, self.intake.produces, self.writer)  # type: ignore[arg-type]
        self.next = 0

    def read(self, value: bytes | None, headers: list[tuple[str, bytes]]) -> list[Work]:
        record = FakeRecord(self.next, value, tuple(headers))
        self.next += 1
        return self.intake.read(self.machine, record)  # type: ignore[arg-type]

    async def give(self, value: bytes | None, headers: list[tuple[str, bytes]]) -> None:
        for work in self.read(value, headers):
            ended = await self.worker.perform(work)
            self.machine.finished(work.unit, work.k, ended.offset, parked=ended.parked)
            self.intake.settled(work.partition, work.unit)

    async def give_record(self, record: msgspec.Struct) -> None:
        await self.give(*encode(record))

    @property
    def committed(self) -> int:
        commit = self.machine.commit()
        assert commit is not None
        return commit.offset


def prompt(n: int = 1, i: int = 0) -> Prompt:
    return Prompt(run="r", pipeline="rl", n=n, i=i, k=2, env=EnvRef("e"), row=ROW)


def rollout(n: int = 1, i: int = 0, **fields: Any) -> Rollout:
    return Rollout(run="r", pipeline="rl", n=n, i=i, k=2, env=EnvRef("e"), row=ROW,
                   **{"stop": Stop.STOP, **fields})


async def generate(given: Prompt) -> Rollout:
    return rollout(given.n, given.i)


async def score(group: Scored) -> Scored:
    return group


async def distil(group: Scored) -> Distilled:
    return passed_on(Distilled, group)


async def fail(_: Any) -> Any:
    raise ZeroDivisionError("rubric")


def generator(**fields: Any) -> Line:
    return Line("generator", Step(each=generate, max_attempts=1, **fields), "Rollout")


def scorer(call: Any = score) -> Line:
    return Line("scorer", Step(group=call, max_attempts=2, retry_pause_s=0), "Scored")


async def test_each_prompt_ends_in_one_rollout_that_knows_its_offset():
    line = generator()
    for _ in range(2):
        await line.give_record(prompt())
    await line.give_record(prompt(i=1))
    assert [(r.n, r.i, r.prompt_offset) for r in line.writer.to("rollouts")] == [
        (1, 0, 0), (1, 1, 2)
    ]
    assert line.committed == 3


async def test_an_undecodable_prompt_is_kept_and_closes_its_slot():
    line = generator()
    _, headers = encode(prompt(i=1))
    await line.give(b"\x00 garbage", headers)
    (letter,), (ended,) = line.writer.to("dlq"), line.writer.to("rollouts")
    assert [one.value for one in letter.inputs] == [b"\x00 garbage"]
    assert (ended.n, ended.i, ended.stop) == (1, 1, Stop.ERROR)
    assert ended.error.type == "undecodable"
    assert line.committed == 1


async def test_a_record_that_is_nobodys_is_kept_before_it_is_passed():
    line = generator()
    (work,) = line.read(b"what?", [])
    assert line.committed == 0
    ended = await line.worker.perform(work)
    line.machine.finished(work.unit, work.k, ended.offset)
    assert line.committed == 1
    assert [type(record) for _, _, record in line.writer.sent] == [DeadLetter]


async def test_a_step_that_raises_ends_a_prompt_as_an_error_never_as_nothing():
    line = Line("generator", Step(each=fail, max_attempts=1), "Rollout")
    await line.give_record(prompt())
    (ended,) = line.writer.to("rollouts")
    assert (ended.stop, ended.prompt_offset) == (Stop.ERROR, 0)
    assert ended.error.type == "ZeroDivisionError"


async def test_a_stopped_run_cancels_what_is_not_begun():
    line = generator()
    line.context.status = Status.STOPPED
    await line.give_record(prompt())
    (ended,) = line.writer.to("rollouts")
    assert ended.stop is Stop.CANCELLED


async def test_a_group_closes_with_its_first_samples_and_late_ones_are_ignored():
    line = scorer()
    await line.give_record(rollout(i=0, model="first"))
    await line.give_record(rollout(i=0, model="second"))
    assert line.committed == 0
    await line.give_record(rollout(i=1))
    await line.give_record(rollout(i=1))
    (group,) = line.writer.to("scored")
    assert ([s.i for s in group.samples], group.model) == ([0, 1], "first")
    assert line.committed == 4


async def test_an_undecodable_rollout_closes_its_slot_in_the_group():
    line = scorer()
    _, headers = encode(rollout(i=0))
    await line.give(b"{", headers)
    assert line.committed == 0
    await line.give_record(rollout(i=1))
    (group,) = line.writer.to("scored")
    assert [s.error.type if s.error else None for s in group.samples] == ["undecodable", None]
    assert group.row == ROW
    assert [letter.error.type for letter in line.writer.to("dlq")] == ["undecodable"]
    assert line.committed == 2


async def test_an_unscorable_group_is_parked_with_its_original_bytes():
    line = scorer(fail)
    bodies = [encode(rollout(i=i)) for i in (0, 1)]
    for body in bodies:
        await line.give(*body)
    (letter,), (parked,) = line.writer.to("dlq"), line.writer.to("scored")
    assert [one.value for one in letter.inputs] == [body for body, _ in bodies]
    assert [list(one.headers) for one in letter.inputs] == [headers for _, headers in bodies]
    assert [(one.offset, one.key, one.timestamp_ms) for one in letter.inputs] == [
        (0, b"r/1", 1000), (1, b"r/1", 1000)
    ]
    assert (letter.stage, letter.n, letter.error.type) == ("scorer", 1, "ZeroDivisionError")
    assert (parked.kind, parked.reason, parked.samples) == (Kind.PARKED, "ZeroDivisionError", [])
    order = [topic for topic, _, _ in line.writer.sent]
    assert order == ["dlq", "scored"]
    assert line.machine.seen.is_parked(1)
    assert not line.machine.seen.has(Unit(1))


async def test_a_redriven_group_is_scored_again_by_the_instance_it_is_for():
    line = scorer(fail)
    for i in (0, 1):
        await line.give_record(rollout(i=i))
    put_back = group_of([rollout(i=0), rollout(i=1)])
    put_back.redrives = 1
    body, headers = encode(put_back)
    await line.give(body, [*headers, ("to", b"scorer:other")])
    assert len(line.writer.to("scored")) == 1
    line.worker._call = score
    await line.give(body, [*headers, ("to", b"scorer")])
    await line.give(body, [*headers, ("to", b"scorer")])
    assert [(g.kind, g.redrives) for g in line.writer.to("scored")] == [
        (Kind.PARKED, 0), (Kind.SCORED, 1)
    ]
    assert line.committed == 5


async def test_a_group_that_fails_again_is_parked_again():
    line = scorer(fail)
    for i in (0, 1):
        await line.give_record(rollout(i=i))
    put_back = group_of([rollout(i=0), rollout(i=1)])
    put_back.redrives = 1
    body, headers = encode(put_back)
    await line.give(body, [*headers, ("to", b"scorer")])
    assert [g.redrives for g in line.writer.to("scored")] == [0, 1]
    assert [letter.redrives for letter in line.writer.to("dlq")] == [0, 1]
    assert line.machine.seen.is_parked(1, redrives=1)


async def test_what_was_parked_before_this_stage_is_passed_on_and_worked_on_once_it_is_scored():
    line = teacher(distil)
    parked = Scored(run="r", pipeline="rl", n=1, k=2, env=EnvRef("e"), row=ROW, kind=Kind.PARKED)
    await line.give_record(parked)
    await line.give_record(parked)
    again = group_of([rollout(i=0), rollout(i=1)])
    again.redrives = 1
    await line.give_record(again)
    assert [(g.kind, g.redrives) for g in line.writer.to("distilled")] == [
        (Kind.PARKED, 0), (Kind.SCORED, 1)
    ]


async def test_too_many_failures_in_a_row_stop_the_loop_instead():
    line = scorer(fail)

    async def drain_a_topic() -> None:
        for n in range(1, 1000, 4):
            for i in (0, 1):
                await line.give_record(rollout(n=n, i=i))

    with pytest.raises(TooManyFailures, match="nothing was lost"):
        await drain_a_topic()
    assert len(line.writer.to("dlq")) == FAILURES_IN_A_ROW - 1


async def test_a_blocked_step_writes_nothing():
    async def blocked(_: Any) -> Any:
        raise Blocked("401")

    line = Line("generator", Step(each=blocked), "Rollout")
    with pytest.raises(Blocked):
        await line.give_record(prompt())
    assert line.writer.sent == []
    assert line.committed == 0


def teacher(call: Any = fail) -> Line:
    config = run(partitions=4)
    from rollstream.shared.routes import builtin, stages

    config = msgspec.structs.replace(config, stages=stages(builtin(), "rl", teacher=True))
    return Line("teacher-distiller", Step(each=call, max_attempts=1), "Distilled", config)


async def test_dropped_and_parked_groups_pass_through_untouched():
    line = teacher()
    for n, kind in ((1, Kind.DROPPED), (5, Kind.PARKED)):
        group = group_of([rollout(n=n, i=0), rollout(n=n, i=1)])
        group.kind, group.reason = kind, "why"
        await line.give_record(group)
    passed = line.writer.to("distilled")
    assert [(type(g), g.n, g.kind, g.reason) for g in passed] == [
        (Distilled, 1, Kind.DROPPED, "why"), (Distilled, 5, Kind.PARKED, "why"),
    ]


async def test_an_undecodable_group_goes_on_as_parked():
    line = teacher()
    _, headers = encode(group_of([rollout(i=0), rollout(i=1)]))
    await line.give(b"[]", headers)
    (parked,) = line.writer.to("distilled")
    assert (parked.n, parked.k, parked.kind, parked.reason) == (1, 2, Kind.PARKED, "undecodable")
    assert len(line.writer.to("dlq")) == 1


async def test_an_output_that_no_topic_takes_is_a_drop_not_a_wait_for_ever():
    line = scorer()
    line.writer.full_above_bytes = 1200
    await line.give_record(rollout(i=0, completion=[{"role": "assistant", "content": "x" * 2000}]))
    await line.give_record(rollout(i=1))
    (group,) = line.writer.to("scored")
    assert (group.kind, group.reason, group.samples) == (Kind.DROPPED, "too_large", [])
    assert line.committed == 2


async def test_an_expired_group_is_dropped_with_what_came(monkeypatch: pytest.MonkeyPatch):
    line = scorer()
    await line.give_record(rollout(i=0, prompt_offset=8))

    async def passed(self: Intake) -> dict[int, int]:
        return {1: line_passed}

    monkeypatch.setattr(Intake, "_upstream_commits", passed)
    monkeypatch.setattr("rollstream.shared.intake.EXPIRY_CHECK_S", 0.0)
    line.intake.at_end(1, now_s=100.0)
    machines, late_s = {1: line.machine}, 100.0 + line.context.run.deadlines.group_s
    line_passed = 9
    assert await line.intake.expired(late_s, machines) == [], "its sibling's prompt is in flight"
    line_passed = 10
    assert await line.intake.expired(late_s - 10, machines) == []
    (work,) = await line.intake.expired(late_s, machines)
    ended = await line.worker.perform(work)
    line.machine.finished(work.unit, work.k, ended.offset)
    (group,) = line.writer.to("scored")
    assert (group.kind, group.reason, len(group.samples)) == (Kind.DROPPED, "deadline", 1)
    assert line.committed == 1
