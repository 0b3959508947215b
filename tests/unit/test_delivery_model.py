"""A whole line under every interleaving: no group is lost, doubled or torn.

Two generators, two scorers and two sinks share one partition; of each pair one owns it at a time,
the other may be a zombie that goes on with what it had. Logs have gaps (transaction markers,
compaction), commits get lost or lose their hint, anybody is killed at any moment, groups are parked
and put back. The machines are the real ones; only the broker is a few lists.
"""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollstream.services.sink.decide import Decider, Decision
from rollstream.shared.frontier import decode_hint, encode_hint
from rollstream.shared.groups import Assembler
from rollstream.shared.ledger import Ledger
from rollstream.shared.partition import Partition, Verdict
from rollstream.shared.records import EnvRef, Issued, Kind, Outcome, Redriven, Row, Scored
from rollstream.shared.seen import Seen, Unit

K = 2


class Record(NamedTuple):
    """What a log holds: a sample, or a group with the number of the scoring that made it."""

    n: int
    i: int | None = None
    scoring: int = 0
    parked: bool = False
    redrives: int = 0


Log = list[Record | None]
"""None is an offset without a record."""


class Task(NamedTuple):
    unit: Unit
    redrives: int = 0


class Member:
    """A process of a stage: machine and open groups go with the partition, tasks stay."""

    def __init__(self) -> None:
        self.machine: Partition | None = None
        self.open: Assembler[int] = Assembler(1e9)
        self.tasks: list[Task] = []


class Stage:
    """A consumer group of two on one partition."""

    def __init__(self, source: Log, output: Log, *, groups: bool) -> None:
        self.source, self.output, self.groups = source, output, groups
        self.members = [Member(), Member()]
        self.owner: int | None = None
        self.committed: tuple[int, str] = (0, "")

    def assign(self, who: int, *, keep_hint: bool, polite: bool) -> None:
        if self.owner is not None:
            old = self.members[self.owner]
            if polite and old.machine is not None:
                self.commit(old.machine, going_on_s=0.0 if self.groups else 60.0)
            old.machine, old.open = None, Assembler(1e9)
        offset, text = self.committed
        machine = Partition(1, committed=offset, hint=decode_hint(text) if keep_hint else None)
        for at in range(machine.out_position, len(self.output)):
            if (record := self.output[at]) is not None:
                unit = Unit(record.n, record.i)
                machine.found(unit, K, at, parked=record.redrives if record.parked else None)
        self.members[who].machine, self.members[who].open = machine, Assembler(1e9)
        self.owner = who

    def commit(self, machine: Partition, *, going_on_s: float = 0.0) -> None:
        if (commit := machine.commit(going_on_s=going_on_s)) is not None:
            self.committed = (commit.offset, encode_hint(commit.hint))

    def read(self) -> bool:
        """The owner reads its next record; whether there was one."""
        member = self.members[self.owner] if self.owner is not None else Member()
        machine = member.machine
        if machine is None:
            return False
        at = machine.next_offset
        while at < len(self.source) and self.source[at] is None:
            at += 1
        if at >= len(self.source):
            return False
        record = self.source[at]
        assert record is not None
        unit = Unit(record.n) if self.groups else Unit(record.n, record.i)
        verdict = machine.read(at, unit, record.redrives)
        if verdict is Verdict.KNOWN:
            return True
        if self.groups and record.i is not None:
            if member.open.add(record.n, record.i, K, at, timestamp_s=0) is None:
                return True
        elif verdict is Verdict.JOINED:
            return True
        task = Task(unit, record.redrives)
        if task not in member.tasks:
            member.tasks.append(task)
        return True

    def finish(self, who: int, at: int, scoring: int, *, park: bool) -> None:
        member = self.members[who]
        if not member.tasks:
            return
        unit, redrives = member.tasks.pop(at % len(member.tasks))
        parked = park and self.groups
        self.output.append(Record(unit.n, unit.i, scoring, parked, redrives))
        if member.machine is not None:
            member.machine.finished(
                unit, K, len(self.output) - 1, parked=redrives if parked else None
            )
            member.open.discard(unit.n)


class Line(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.prompts: Log = []
        self.rollouts: Log = []
        self.scored: Log = []
        self.generator = Stage(self.prompts, self.rollouts, groups=False)
        self.scorer = Stage(self.rollouts, self.scored, groups=True)
        self.ledger = Ledger(["dataset"], 1)
        self.parts: dict[int, tuple[int, list[Decision]]] = {}
        self.sinks: list[Sink | None] = [None, None]
        self.scorings = 0
        self.groups = 0

    stages = st.sampled_from(["generator", "scorer"])
    whose = st.integers(0, 1)

    @initialize(groups=st.integers(2, 4))
    def begin(self, groups: int) -> None:
        self.issue(groups)

    @rule(groups=st.integers(1, 2))
    def issue(self, groups: int) -> None:
        for _ in range(groups):
            self.ledger.apply(0, Issued(n=self.groups, k=K))
            self.prompts += [Record(self.groups, i) for i in range(K)]
            self.groups += 1

    @rule(log=st.sampled_from(["prompts", "rollouts", "scored"]))
    def gap(self, log: str) -> None:
        getattr(self, log).append(None)

    @rule(at=st.integers(0, 40))
    def duplicate_prompt(self, at: int) -> None:
        if self.prompts and (record := self.prompts[at % len(self.prompts)]) is not None:
            self.prompts.append(record)

    @rule(stage=stages, who=whose, keep_hint=st.booleans(), polite=st.booleans())
    def assign(self, stage: str, who: int, keep_hint: bool, polite: bool) -> None:
        getattr(self, stage).assign(who, keep_hint=keep_hint, polite=polite)

    @rule(
        stage=stages, reads=st.sampled_from([8, 4, 2, 1, 0]), who=whose,
        at=st.lists(st.integers(0, 20), min_size=1, max_size=6), park=st.booleans(),
    )
    def work(self, stage: str, reads: int, who: int, at: list[int], park: bool) -> None:
        """The owner reads on; then one of the two finishes some of what it has, in any order."""
        found: Stage = getattr(self, stage)
        if found.owner is None:
            found.assign(who, keep_hint=True, polite=False)
        for _ in range(reads):
            found.read()
        for place in at:
            self.scorings += 1
            found.finish(who, place, self.scorings, park=park)

    @rule(who=whose, at=st.lists(st.integers(0, 20), min_size=2, max_size=5), park=st.booleans())
    def flow(self, who: int, at: list[int], park: bool) -> None:
        """Something gets from the prompts to the sinks."""
        self.work("generator", 8, who, [*at, *at], park)
        self.work("scorer", 8, who, at, park)
        self.sink_reads(who, False, 4)

    @rule(
        stage=stages, polite=st.booleans(), keep_hint=st.booleans(),
        order=st.lists(st.tuples(whose, st.integers(0, 20)), min_size=1, max_size=6),
        again=st.booleans(),
    )
    def zombie(
        self, stage: str, polite: bool, keep_hint: bool, order: list[tuple[int, int]], again: bool
    ) -> None:
        """The owner loses the partition with work in hand; both finish theirs, in any order."""
        found: Stage = getattr(self, stage)
        self.work(stage, 8, 0, [], False)
        for _ in range(1 + again):
            found.assign(1 - (found.owner or 0), keep_hint=keep_hint, polite=polite)
            self.work(stage, 8, 0, [], False)
        for who, at in order:
            self.work(stage, 0, who, [at], False)

    @rule(stage=stages)
    def commit(self, stage: str) -> None:
        found: Stage = getattr(self, stage)
        if found.owner is not None and (machine := found.members[found.owner].machine):
            found.commit(machine)

    @rule(stage=stages, who=whose)
    def kill(self, stage: str, who: int) -> None:
        found: Stage = getattr(self, stage)
        found.members[who] = Member()
        if found.owner == who:
            found.owner = None

    @rule(at=st.integers(0, 20), told=st.booleans())
    def redrive(self, at: int, told: bool) -> None:
        """A parked group is put back; a kill may come before the ledger is told."""
        parked = self.ledger.parked_groups("dataset")
        if parked:
            self._put_back(parked[at % len(parked)], told=told)

    def _put_back(self, n: int, *, told: bool = True) -> None:
        tries = 1 + max(r.redrives for r in self.scored if r is not None and r.n == n and r.parked)
        self.rollouts.append(Record(n, redrives=tries))
        if told:
            self.ledger.apply(0, Redriven(n=n, redrives=tries))

    # -- the sinks: parts are the truth -----------------------------------------------------------

    @rule(who=whose, anew=st.booleans(), reads=st.sampled_from([4, 2, 1]))
    def sink_reads(self, who: int, anew: bool, reads: int) -> None:
        sink = self.sinks[who]
        if sink is None or anew:
            sink = self.sinks[who] = Sink(self.parts, self.ledger)
        for _ in range(reads):
            sink.read(self.scored)

    @rule(who=whose, killed=st.booleans())
    def sink_writes(self, who: int, killed: bool) -> None:
        """Part, then ledger; killed between the two, or thrown out by the other one's part."""
        sink = self.sinks[who]
        if sink is not None and not sink.write(self.parts, self.ledger, killed=killed):
            self.sinks[who] = None

    @invariant()
    def no_group_ends_twice_and_none_is_torn(self) -> None:
        ended: dict[int, Decision] = {}
        for _, decisions in self.parts.values():
            for decision in decisions:
                if decision.outcome is not Outcome.PARKED:
                    assert decision.n not in ended, "a group ended twice"
                    ended[decision.n] = decision
        for n, decision in ended.items():
            first = next(r for r in self.scored if r is not None and r.n == n and not r.parked)
            assert decision.group is not None
            assert decision.group.detail == str(first.scoring), "not the first in the log"

    @invariant()
    def the_books_balance(self) -> None:
        assert all(books.balanced for books in self.ledger.books())

    def teardown(self) -> None:
        """Nobody hurts anything any more: every group ends once."""
        for stage in (self.generator, self.scorer):
            self._drain(stage)
        self._sink_all()
        for _ in range(3):
            parked = self.ledger.parked_groups("dataset")
            for n in parked:
                self._put_back(n)
            self._drain(self.scorer)
            self._sink_all()
        [books] = self.ledger.books()
        assert (books.delivered, books.in_flight, books.parked) == (self.groups, 0, 0), books
        assert sorted(
            d.n for _, ds in self.parts.values() for d in ds if d.outcome is Outcome.DELIVERED
        ) == list(range(self.groups))

    def _drain(self, stage: Stage) -> None:
        stage.members = [Member(), Member()]
        stage.owner = None
        stage.assign(0, keep_hint=True, polite=False)
        while stage.read() or stage.members[0].tasks:
            self.scorings += 1
            stage.finish(0, 0, self.scorings, park=False)
        machine = stage.members[0].machine
        assert machine is not None
        assert len(machine) == 0, "something is open that nobody works on"

    def _sink_all(self) -> None:
        sink = Sink(self.parts, self.ledger)
        while sink.read(self.scored):
            pass
        assert sink.write(self.parts, self.ledger, killed=False)


class Sink:
    """One sink process on the partition, from the end of the chain of parts."""

    def __init__(self, parts: dict[int, tuple[int, list[Decision]]], ledger: Ledger) -> None:
        seen, self.start = Seen(1), 0
        while self.start in parts:
            self.start, decisions = parts[self.start]
            for decision in decisions:
                parked = decision.outcome is Outcome.PARKED
                if parked:
                    seen.park(decision.n, decision.redrives)
                else:
                    seen.add_group(decision.n)
                if not ledger.ended("dataset", decision.n) and not (
                    parked and ledger.set_aside("dataset", decision.n, decision.redrives)
                ):
                    ledger.apply(0, decision.ended("dataset"))
        self.position = self.start
        self.decider = Decider(seen)
        self.buffer: list[Decision] = []

    def read(self, scored: Log) -> bool:
        if self.position >= len(scored):
            return False
        record = scored[self.position]
        self.position += 1
        if record is not None:
            group = Scored(
                run="r", pipeline="sft", n=record.n, k=K, env=EnvRef("e"), row=Row(prompt=[]),
                kind=Kind.PARKED if record.parked else Kind.SCORED, detail=str(record.scoring),
                redrives=record.redrives,
            )
            if (decision := self.decider.decide(group)) is not None:
                self.buffer.append(decision)
        return True

    def write(
        self, parts: dict[int, tuple[int, list[Decision]]], ledger: Ledger, *, killed: bool
    ) -> bool:
        """Whether it still is the owner."""
        if self.position == self.start:
            return True
        if self.start in parts:
            return False
        parts[self.start] = (self.position, self.buffer)
        decisions, self.buffer, self.start = self.buffer, [], self.position
        if killed:
            return False
        for decision in decisions:
            ledger.apply(0, decision.ended("dataset"))
        return True


Line.TestCase.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
test_line = Line.TestCase
