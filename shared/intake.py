"""From an input record to a piece of work: decoding, assembly of groups, pass-through, deadlines.

No I/O but one question to the broker (how far the stage before has got), asked only when a group's
deadline has passed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiokafka import ConsumerRecord
from aiokafka.errors import KafkaError

from rollstream.shared.bus import start, stop
from rollstream.shared.codec import Undecodable, decode, header_int, header_text
from rollstream.shared.commits import ask_commits
from rollstream.shared.dead_letters import parked_stub, slot_rollout
from rollstream.shared.groups import Assembler, OpenGroup
from rollstream.shared.partition import Partition, Verdict
from rollstream.shared.records import (
    Distilled,
    Failure,
    Group,
    Input,
    Kind,
    Rollout,
    Row,
    Scored,
    passed_on,
)
from rollstream.shared.retention import LostUnit, ended_as_lost
from rollstream.shared.seen import Unit
from rollstream.shared.service import RunContext
from rollstream.shared.step import Step

PRODUCED: dict[str, type] = {"Rollout": Rollout, "Scored": Scored, "Distilled": Distilled}
EXPIRY_CHECK_S = 5.0


@dataclass
class Work:
    """One unit to be worked on: its input, or its output where there is nothing left to do."""

    partition: int
    unit: Unit
    k: int
    given: Any
    inputs: list[Input] = field(default_factory=list)
    """One or more; a value of None was left in the log (`Refetch` brings it back in time)."""
    output: Any = None
    """The record to write as it is: a pass-through, a drop, an undecodable slot."""
    evidence: Failure | None = None
    """The input goes to the dead letters as well."""
    later: bool = False
    late: bool = False
    """The group's deadline has passed: what came of it ends as dropped(deadline)."""

    @property
    def left_in_log(self) -> list[int]:
        """Which of its inputs have to be fetched again, by their place."""
        return [at for at, given in enumerate(self.inputs) if given.value is None]


@dataclass
class _Member:
    rollout: Rollout
    input: Input


class Intake:
    """Decides, record by record, what there is to do."""

    def __init__(self, context: RunContext, step: Step, produces: str) -> None:
        self._context = context
        self._step = step
        self.produces = PRODUCED[produces]
        self._assemblers: dict[int, Assembler[_Member]] = {}
        self._expiry_checked_s = 0.0

    def read(self, machine: Partition, record: ConsumerRecord) -> list[Work]:
        """The pieces of work that this record completes: none or one."""
        headers = list(record.headers)
        target = header_text(headers, "to")
        if target is not None:
            return self._redriven(machine, record, target)
        n, i = header_int(headers, "rs-group"), header_int(headers, "rs-sample")
        if n is None:
            # Nobody's slot can be told from it: it is kept as evidence by the worker.
            return [self._evidence(machine, record, "no rs-group header")]
        unit = Unit(n) if self._step.groups else Unit(n, i)
        verdict = machine.read(record.offset, unit, header_int(headers, "rs-redrives") or 0)
        if verdict is Verdict.KNOWN:
            return []
        if verdict is Verdict.JOINED and not self._step.groups:
            return []
        try:
            body = decode(record.value, headers)
        except Undecodable as error:
            return [self._undecodable(record, unit, str(error))]
        later = verdict is Verdict.LATER
        if self._step.groups and isinstance(body, Rollout):
            return self._assemble(record, unit, body)
        if isinstance(body, Group) and body.kind is not Kind.SCORED:
            return [self._work(record, unit, body, output=passed_on(self.produces, body))]
        return [self._work(record, unit, body, later=later)]

    def _work(
        self, record: ConsumerRecord, unit: Unit, body: Any, *, output: Any = None,
        later: bool = False,
    ) -> Work:
        return Work(
            record.partition, unit, body.k, body,
            [_input(record)], output, later=later,
        )

    def _assemble(self, record: ConsumerRecord, unit: Unit, rollout: Rollout) -> list[Work]:
        assembler = self._assembler(record.partition)
        member, size_bytes = _Member(rollout, _input(record)), len(record.value or b"")
        if self.open_bytes + size_bytes > self._step.max_open_bytes:
            # It goes on reading whatever is open: missing siblings may lie behind (rule 14).
            member, size_bytes = _without_body(member), 0
        members = assembler.add(
            rollout.n, rollout.i, rollout.k, member,
            timestamp_s=record.timestamp / 1000, size_bytes=size_bytes,
        )
        if members is None:
            return []
        return [self._group_work(record.partition, unit, rollout.k, members)]

    def _group_work(
        self, partition: int, unit: Unit, k: int, members: list[_Member]
    ) -> Work:
        return Work(
            partition, unit, k, [member.rollout for member in members],
            [member.input for member in members],
        )

    def _redriven(self, machine: Partition, record: ConsumerRecord, target: str) -> list[Work]:
        """A parked group that was put back, for the instance that parked it."""
        if target != self._context.route.instance:
            machine.skip(record.offset)
            return []
        try:
            body = decode(record.value, list(record.headers))
        except Undecodable as error:
            return [self._evidence(machine, record, str(error))]
        if not isinstance(body, Group):
            machine.skip(record.offset)
            return []
        unit = Unit(body.n)
        if machine.read(record.offset, unit, body.redrives) in (Verdict.KNOWN, Verdict.JOINED):
            return []
        return [self._work(record, unit, body)]

    def _undecodable(self, record: ConsumerRecord, unit: Unit, reason: str) -> Work:
        """Evidence to the dead letters; the slot goes on as an error, the group as parked."""
        run, headers = self._context.run, list(record.headers)
        if unit.i is None and not self._step.groups:
            output = parked_stub(self.produces, run, headers, unit.n, reason)
            work = self._work(record, unit, output, output=output)
        else:
            slot = slot_rollout(run, headers, unit.n, reason)
            if self._step.groups and (assembled := self._assemble(record, unit, slot)):
                work = assembled[0]
            elif self._step.groups:
                work = self._work(record, unit, slot)
                work.unit, work.k = _evidence_unit(record), 0
            else:
                work = self._work(record, unit, slot, output=slot)
        work.evidence = Failure("undecodable", reason)
        return work

    def _evidence(self, machine: Partition, record: ConsumerRecord, reason: str) -> Work:
        """Nobody's slot can be told from it: it is kept, and passed once it is."""
        machine.hold(record.offset, _evidence_unit(record))
        return Work(
            record.partition, _evidence_unit(record), 0, None, [_input(record)],
            evidence=Failure("undecodable", reason),
        )

    def lost(self, partition: int, lost: LostUnit) -> Work:
        """A unit that must end although its records were deleted unread."""
        output = ended_as_lost(self.produces, self._context.run, lost)
        nothing = Input(-1, b"")
        return Work(partition, lost.unit, lost.k, output, [nothing], output=output)

    def settled(self, partition: int, unit: Unit) -> None:
        """The unit's output is written: what was assembled of it meanwhile is not needed."""
        if partition in self._assemblers:
            self._assemblers[partition].discard(unit.n)

    def at_end(self, partition: int, now_s: float) -> None:
        """The reader stands at the partition's end."""
        if partition in self._assemblers:
            self._assemblers[partition].at_end(now_s)

    def forget(self) -> None:
        """The assignment changed: everything is read again."""
        self._assemblers.clear()

    @property
    def open_groups(self) -> int:
        return sum(len(assembler) for assembler in self._assemblers.values())

    @property
    def open_bytes(self) -> int:
        """What open groups hold in memory."""
        return sum(assembler.size_bytes for assembler in self._assemblers.values())

    def _assembler(self, partition: int) -> Assembler[_Member]:
        deadline_s = self._context.run.deadlines.group_s
        return self._assemblers.setdefault(partition, Assembler(deadline_s))

    # -- deadlines -----------------------------------------------------------------------------

    async def expired(self, now_s: float, machines: dict[int, Partition]) -> list[Work]:
        """Groups past their deadline whose prompts the stage before has left behind."""
        if time.monotonic() - self._expiry_checked_s < EXPIRY_CHECK_S:
            return []
        self._expiry_checked_s = time.monotonic()
        late = [
            (partition, group)
            for partition, assembler in self._assemblers.items()
            for group in assembler.expired(now_s)
            if partition in machines
        ]
        if not late:
            return []
        passed = await self._upstream_commits()
        return [
            self._close(partition, group)
            for partition, group in late
            if _prompts_end(group) <= passed.get(partition, 0)
        ]

    def _close(self, partition: int, group: OpenGroup[_Member]) -> Work:
        self._assemblers[partition].discard(group.n)
        members = [group.members[i] for i in sorted(group.members)]
        work = self._group_work(partition, Unit(group.n), group.k, members)
        run = self._context.run
        if run.group_policy == "min_viable" and len(members) >= max(1, run.min_viable):
            return work
        work.late = True
        return work

    async def _upstream_commits(self) -> dict[int, int]:
        """Per partition how far the stage that writes our input has committed its own input."""
        run, route = self._context.run, self._context.route
        writer = next(s for s in run.stages if s.output == route.input)
        upstream, partitions = RunContext(run, writer, self._context.bus), range(run.partitions)
        admin = self._context.bus.admin()
        await start(admin)
        try:
            commits = await ask_commits(admin, upstream, partitions)
        except (KafkaError, TimeoutError, OSError):
            return {}
        finally:
            await stop(admin)
        return {p: commits[p].offset if p in commits else -1 for p in partitions}


def _input(record: ConsumerRecord) -> Input:
    return Input(
        record.offset, record.value or b"", list(record.headers), record.key, record.timestamp
    )


def _without_body(member: _Member) -> _Member:
    """What assembly needs of a rollout; the rest stays in the log."""
    light = msgspec.structs.replace(
        member.rollout, row=Row(prompt=[]), completion=[], sequences=[], state={}
    )
    return _Member(light, msgspec.structs.replace(member.input, value=None))


def _evidence_unit(record: ConsumerRecord) -> Unit:
    """A unit of its own, below all groups, for a record that settles nothing."""
    return Unit(-1 - record.offset)


def _prompts_end(group: OpenGroup[_Member]) -> int:
    """The offset after the group's last Prompt: its k prompts lie side by side."""
    return max(
        member.rollout.prompt_offset - i + group.k for i, member in group.members.items()
    )
