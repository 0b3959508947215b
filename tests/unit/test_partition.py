"""The machine of one partition, against every crash, rebalance, duplicate and zombie.

A model broker holds an input log, an output log and the last commit. Members work on what the
machine hands them, in any order; they may be killed, lose the partition and go on (a zombie), or
be given it anew. In the end every unit must be in the output, and the first record of each counts.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from rollstream.shared.frontier import Hint, decode_hint, encode_hint
from rollstream.shared.partition import Partition, Verdict
from rollstream.shared.seen import Unit

K = 2


class Member:
    """One process: its machine, and the tasks that survive its machine."""

    def __init__(self) -> None:
        self.machine: Partition | None = None
        self.tasks: list[Unit] = []


class TwoMembers(RuleBasedStateMachine):
    """Two members, of which one owns the partition at a time; the other may be a zombie."""

    units = Bundle("units")

    def __init__(self) -> None:
        super().__init__()
        self.input: list[Unit] = []
        self.output: list[Unit] = []
        self.commit: tuple[int, str] = (0, "")
        self.members = [Member(), Member()]
        self.owner: int | None = None
        self.repeated_after_kill = 0

    @rule()
    def produce_group(self) -> None:
        n = len({unit.n for unit in self.input})
        self.input += [Unit(n, i) for i in range(K)]

    @rule(at=st.integers(0, 50))
    def produce_duplicate(self, at: int) -> None:
        if self.input:
            self.input.append(self.input[at % len(self.input)])

    @rule(who=st.integers(0, 1), keep_hint=st.booleans(), polite=st.booleans())
    def assign(self, who: int, keep_hint: bool, polite: bool) -> None:
        """The partition changes hands, with or without the old owner's last commit."""
        if self.owner is not None:
            machine = self.members[self.owner].machine
            if polite and machine is not None:
                self._commit(machine, going_on_s=60.0)
            self.members[self.owner].machine = None
        offset, text = self.commit
        hint = decode_hint(text) if keep_hint else None
        machine = Partition(1, committed=offset, hint=hint)
        for at in range(machine.out_position, len(self.output)):
            machine.found(self.output[at], K, at)
        self.members[who].machine = machine
        self.owner = who

    @rule()
    def read(self) -> None:
        if self.owner is None:
            return
        member = self.members[self.owner]
        machine = member.machine
        assert machine is not None
        if machine.next_offset >= len(self.input):
            return
        offset = machine.next_offset
        unit = self.input[offset]
        verdict = machine.read(offset, unit)
        if verdict is Verdict.KNOWN:
            assert unit in self.output
        elif verdict in (Verdict.WORK, Verdict.LATER) and unit not in member.tasks:
            # A unit that is finished is never worked on again by whoever looked at the output.
            assert unit not in self.output[:machine.out_position]
            member.tasks.append(unit)

    @rule(who=st.integers(0, 1), at=st.integers(0, 50))
    def finish(self, who: int, at: int) -> None:
        """A task ends: owner or zombie, its output is acknowledged."""
        member = self.members[who]
        if not member.tasks:
            return
        unit = member.tasks.pop(at % len(member.tasks))
        self.output.append(unit)
        if member.machine is not None:
            member.machine.finished(unit, K, len(self.output) - 1)

    @rule()
    def commit_now(self) -> None:
        if self.owner is not None:
            machine = self.members[self.owner].machine
            assert machine is not None
            self._commit(machine)

    @rule(who=st.integers(0, 1))
    def kill(self, who: int) -> None:
        """kill -9: machine and tasks are gone, the commit stays as it was."""
        self.members[who] = Member()
        if self.owner == who:
            self.owner = None

    def _commit(self, machine: Partition, *, going_on_s: float = 0.0) -> None:
        commit = machine.commit(going_on_s=going_on_s)
        if commit is not None:
            self.commit = (commit.offset, encode_hint(commit.hint))

    @invariant()
    def the_commit_passes_nothing_unfinished(self) -> None:
        assert set(self.input[: self.commit[0]]) <= set(self.output)

    @invariant()
    def the_hint_tells_only_what_is_in_the_output(self) -> None:
        hint = decode_hint(self.commit[1]) or Hint()
        machine = Partition(1, committed=self.commit[0], hint=hint)
        assert all(
            unit in self.output for unit in self.input if machine.seen.has(unit)
        )

    def teardown(self) -> None:
        """Let a last owner finish everything: nothing may be lost."""
        self.assign(0, keep_hint=True, polite=False)
        machine = self.members[0].machine
        assert machine is not None
        while machine.next_offset < len(self.input):
            self.read()
        while self.members[0].tasks:
            self.finish(0, 0)
        assert set(self.input) == set(self.output)
        assert len(machine) == 0
        self._commit(machine)
        assert self.commit[0] == len(self.input)


TwoMembers.TestCase.settings = settings(max_examples=400, stateful_step_count=50, deadline=None)
test_two_members = TwoMembers.TestCase


def test_a_revoke_says_how_far_work_was_dispatched():
    machine = Partition(1)
    machine.read(0, Unit(0, 0))
    machine.read(1, Unit(0, 1))
    machine.finished(Unit(0, 1), K, 0)
    commit = machine.commit(going_on_s=60.0)
    assert commit is not None
    assert commit.offset == 0
    assert commit.hint.going_on_s == 60.0
    after = Partition(1, committed=0, hint=commit.hint)
    assert after.read(0, Unit(0, 0)) is Verdict.LATER
    assert after.read(1, Unit(0, 1)) is Verdict.KNOWN
    assert after.read(2, Unit(1, 0)) is Verdict.WORK
    # A kill leaves no such mark: its work is dispatched at once.
    killed = Partition(1, committed=0, hint=machine.commit() and Hint())
    assert killed.read(0, Unit(0, 0)) is Verdict.WORK


def test_parked_groups_are_worked_on_again_only_when_redriven():
    machine = Partition(1)
    machine.read(0, Unit(0))
    machine.finished(Unit(0), 1, 0, parked=0)
    assert machine.read(1, Unit(0)) is Verdict.KNOWN
    assert machine.read(2, Unit(0), redrives=1) is Verdict.WORK
    machine.finished(Unit(0), 1, 1, parked=1)
    assert machine.read(3, Unit(0), redrives=1) is Verdict.KNOWN
    assert machine.read(4, Unit(0), redrives=2) is Verdict.WORK
    machine.finished(Unit(0), 1, 2)
    assert machine.read(5, Unit(0), redrives=3) is Verdict.KNOWN


def test_held_evidence_blocks_the_frontier_and_settles_nothing():
    machine = Partition(1)
    machine.hold(0, Unit(-1))
    assert machine.commit() is not None
    assert machine.read(1, Unit(0, 0)) is Verdict.WORK
    machine.finished(Unit(0, 0), 2, 0)
    commit = machine.commit()
    assert commit is not None
    assert commit.offset == 0
    machine.finished(Unit(-1), 0, -1)
    commit = machine.commit()
    assert commit is None or commit.offset == 2


def test_a_zombies_output_between_ours_is_not_hidden_by_the_hint():
    """It may be generated a second time meanwhile, but a restart finds it."""
    machine = Partition(1)
    for i in range(2):
        machine.read(i, Unit(0, i))
    machine.finished(Unit(0, 0), K, 1)
    commit = machine.commit()
    assert commit is not None
    assert (commit.hint.out_position, machine.has_gap) == (0, True)
    machine.found(Unit(0, 1), K, 0)
    commit = machine.commit()
    assert commit is not None
    assert (commit.offset, commit.hint.out_position, machine.has_gap) == (2, 2, False)


def test_a_park_of_an_earlier_try_leaves_a_later_one_to_do():
    """Put back while the first try still ran here: what was put back is not lost with it."""
    machine = Partition(1)
    assert machine.read(0, Unit(0)) is Verdict.WORK
    assert machine.read(1, Unit(0), redrives=1) is Verdict.JOINED
    machine.finished(Unit(0), K, 0, parked=0)
    assert machine.in_flight(Unit(0))
    commit = machine.commit()
    assert commit is not None
    assert commit.offset == 1
    again = Partition(1, committed=commit.offset, hint=commit.hint)
    assert again.read(1, Unit(0), redrives=1) is Verdict.WORK
    again.found(Unit(0), K, 1, parked=0)  # the same park once more, by a zombie
    assert again.in_flight(Unit(0))
    again.finished(Unit(0), K, 2, parked=1)
    assert not again.in_flight(Unit(0))


def test_a_try_that_ends_the_group_ends_the_later_ones_too():
    machine = Partition(1)
    machine.read(0, Unit(0))
    machine.read(1, Unit(0), redrives=1)
    machine.finished(Unit(0), K, 0)
    assert not machine.in_flight(Unit(0))
    assert machine.next_offset == 2
