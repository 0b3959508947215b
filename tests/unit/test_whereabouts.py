"""A correct system never raises an alarm; each kind of loss raises one that names the sample."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.shared.ledger import Ledger
from rollstream.shared.records import Ended, Issued, Outcome, Redriven
from rollstream.shared.whereabouts import (
    Committed,
    Found,
    InFlight,
    Place,
    Stage,
    State,
    locate,
    table,
)

K = 2
NOW_S = 1000.0
STAGES = ["generator", "scorer", "teacher-distiller", "sink:dataset"]
READ_IN_ORDER = ["ledger", "commits", 0, 1, 2, 3, "places"]


class Record(NamedTuple):
    n: int
    i: int | None = None
    redrives: int = 0
    parked: bool = False
    to: str | None = None


class Line:
    """A producer and four stages over one partition, as logs; the ledger is the real one."""

    def __init__(self) -> None:
        self.topics: list[list[Record | None]] = [[], [], [], []]
        """The inputs of the stages; None is a record that was lost."""
        self.done: list[set[int]] = [set(), set(), set(), set()]
        self.ledger = Ledger(["dataset"], 1)

    def step(self, what: Any) -> None:
        if isinstance(what, tuple):
            self.work(*what)
        else:
            {"issue": self.issue, "prompt": self.prompt, "redrive": self.redrive}[what]()

    def issue(self) -> None:
        if len(self.topics[0]) == K * self.ledger.next_n:
            self.ledger.apply(0, Issued(n=self.ledger.next_n, k=K))

    def prompt(self) -> None:
        n, i = divmod(len(self.topics[0]), K)
        if n < self.ledger.next_n:
            self.topics[0].append(Record(n, i))

    def redrive(self) -> None:
        for n in self.ledger.parked_groups("dataset")[:1]:
            tries = self.ledger.redrives("dataset", n) + 1
            self.topics[1].append(Record(n, None, tries, to="scorer"))
            self.ledger.apply(0, Redriven(n=n, redrives=tries), NOW_S)

    def work(self, stage: int, at: int, *, park: bool = False) -> None:
        """The stage finishes one of the records that are open there, in any order."""
        topic, done = self.topics[stage], self.done[stage]
        ready = [(o, record) for o, record in enumerate(topic)
                 if record and o not in done and self._whole(stage, record)]
        if not ready:
            return
        offset, record = ready[at % len(ready)]
        done.add(offset)
        if stage == 1 and record.i is not None:
            done |= {o for o, r in enumerate(topic) if r and r.i is not None and r.n == record.n}
        if stage == 3:
            outcome = Outcome.PARKED if record.parked else Outcome.DELIVERED
            self.ledger.apply(0, Ended(
                n=record.n, leaf="dataset", outcome=outcome, redrives=record.redrives
            ))
        else:
            i = record.i if stage == 0 else None
            parked = record.parked or (park and stage == 1)
            self.topics[stage + 1].append(Record(record.n, i, record.redrives, parked))

    def _whole(self, stage: int, record: Record) -> bool:
        siblings = [r for r in self.topics[1] if r and r.n == record.n and r.i is not None]
        return stage != 1 or record.i is None or len(siblings) == K

    def frontier(self, stage: int) -> int:
        return next((o for o in range(len(self.topics[stage])) if o not in self.done[stage]),
                    len(self.topics[stage]))


class Look:
    """What `rollstream ledger` reads, each part at its own moment."""

    def __init__(self, line: Line, *, hints: bool = True) -> None:
        self._line, self._hints = line, hints
        self._topics: dict[int, list[Record | None]] = {}
        self.places: list[Place] = []

    def read(self, what: str | int) -> None:
        line = self._line
        if what == "ledger":
            self._wanted = line.ledger.open_groups("dataset")
            self._issued_max = line.ledger.issued_max[0]
        elif what == "commits":
            self._commits = [
                Committed(line.frontier(s), len(line.topics[s]) if self._hints else None)
                for s in range(4)
            ]
        elif what == "places":
            self.places = self._locate()
        else:
            self._topics[int(what)] = list(line.topics[int(what)])

    def _locate(self) -> list[Place]:
        path = []
        for stage, name in enumerate(STAGES):
            found: dict[int, list[Found]] = {}
            for offset, r in enumerate(self._topics[stage]):
                if r is not None:
                    at = Found(offset, r.i, 10.0 * stage, r.redrives, r.to)
                    found.setdefault(r.n, []).append(at)
            path.append(Stage(name, found, {0: self._commits[stage]}, assembles=stage in (1, 2),
                              leaf=stage == 3))
        newest = max((r.n, (r.i or 0) + 1) for r in [Record(-1), *self._topics[0]] if r)
        ledger = self._line.ledger
        return [
            place for n in self._wanted if n in ledger.open_groups("dataset")
            for place in locate(
                InFlight(n, K, 0, ledger.open_since_s("dataset", n) or 0.0,
                         ledger.redrives("dataset", n)),
                path, producer="prompt-producer", written_to=max(newest, (self._issued_max, 0)),
                now_s=NOW_S,
            )
        ]


finish = st.tuples(st.integers(0, 3), st.integers(0, 9))
steps = st.lists(
    st.one_of(
        st.just("issue"), st.just("prompt"), st.just("prompt"), finish, finish,
        st.just((1, 0, True)), st.just("redrive"),
    ).map(lambda step: step if len(step) != 3 else ("park", step[1])),
    max_size=80,
)
moments = st.lists(st.integers(0, 80), min_size=7, max_size=7).map(sorted)


def advance(line: Line, history: list) -> Line:
    for what in history:
        if isinstance(what, tuple) and what[0] == "park":
            line.work(1, what[1], park=True)
        else:
            line.step(what)
    return line


def look_at(line: Line, *, hints: bool = True) -> list[Place]:
    look = Look(line, hints=hints)
    for what in READ_IN_ORDER:
        look.read(what)
    return look.places


def nowhere(places: list[Place]) -> set[tuple[int, int]]:
    return {(place.n, place.i) for place in places if place.state is State.NOWHERE}


@given(steps, moments, st.booleans())
@settings(max_examples=500, deadline=None)
def test_a_correct_line_never_raises_an_alarm(history: list, moments: list[int], hints: bool):
    """However much happens between one part of the look and the next."""
    line, before = Line(), 0
    look = Look(line, hints=hints)
    for what, at in zip(READ_IN_ORDER, moments, strict=True):
        advance(line, history[before:at])
        before = at
        look.read(what)
    assert not nowhere(look.places)


@given(steps, st.booleans())
@settings(max_examples=200, deadline=None)
def test_each_sample_in_flight_is_counted_once(history: list, hints: bool):
    line = advance(Line(), history)
    places = look_at(line, hints=hints)
    assert len(places) == line.ledger.books()[0].in_flight_samples
    rows = table(places, ["prompt-producer", *STAGES], NOW_S)
    assert sum(sum(row.counts.values()) for row in rows) == len(places)


@given(steps, st.integers(0, 3), st.integers(0, 99))
@settings(max_examples=500, deadline=None)
def test_a_record_that_was_lost_is_named(history: list, stage: int, at: int):
    """One that nothing followed yet is taken out of its topic; its writer goes on as if it were."""
    line = advance(Line(), history)
    open_groups = line.ledger.open_groups("dataset")
    topic = line.topics[stage]
    last = [
        (o, r) for o, r in enumerate(topic)
        if r and r.n in open_groups and r.redrives == line.ledger.redrives("dataset", r.n)
        and not any(later and later.n == r.n and later.redrives == r.redrives
                    and r.i in (None, later.i)
                    for further in line.topics[stage + 1:] for later in further)
        and not any(later and later.n == r.n and later.i is None
                    for further in line.topics[stage + 1:] for later in further)
        and r.to is None
    ]
    if not last:
        return
    offset, record = last[at % len(last)]
    topic[offset] = None
    line.done[stage].add(offset)
    if stage == 0:
        seen = any(r and (r.n, r.i or 0) > (record.n, record.i or 0) for r in topic)
        passed = seen or line.ledger.next_n > record.n + 1
    else:
        source = [o for o, r in enumerate(line.topics[stage - 1])
                  if r and r.n == record.n and r.redrives == record.redrives
                  and (record.i is None or r.i == record.i)]
        passed = min(source) < line.frontier(stage - 1)
    lost = {(record.n, i) for i in range(K) if record.i in (None, i)} if passed else set()
    assert nowhere(look_at(line)) == lost


@given(steps)
@settings(max_examples=200, deadline=None)
def test_a_group_that_the_leaf_passed_without_ending_it_is_named(history: list):
    line = advance(Line(), history)
    ready = [r for o, r in enumerate(line.topics[3]) if r and o not in line.done[3]
             and r.n in line.ledger.open_groups("dataset")]
    line.done[3] |= set(range(len(line.topics[3])))
    assert nowhere(look_at(line)) == {(r.n, i) for r in ready for i in range(K)}


def located(
    group: InFlight, *path: Stage, written_to: tuple[int, int] = (9, 0)
) -> list[State]:
    places = locate(group, path, producer="p", written_to=written_to, now_s=NOW_S)
    return [place.state for place in places]


def test_each_state():
    group = InFlight(4, K, 0, 0.0)
    both = {4: [Found(7, 0, 1.0), Found(8, 1, 1.0)]}
    one = {4: [Found(7, 0, 1.0)]}
    whole = {4: [Found(3, None, 2.0)]}
    generator = Stage("generator", both, {0: Committed(7, 8)})
    assert located(group, generator) == [State.RUNNING, State.QUEUED]
    assert located(group, Stage("g", both, {})) == [State.WAITING, State.WAITING]
    scorer = Stage("scorer", one, {0: Committed(7, 8)}, assembles=True)
    assert located(group, generator, scorer) == [State.OPEN, State.QUEUED]
    leaf = Stage("sink", whole, {0: Committed(3)}, leaf=True)
    assert located(group, generator, scorer, leaf) == [State.BUFFERED, State.BUFFERED]
    ended = Stage("sink", whole, {0: Committed(4)}, leaf=True)
    assert located(group, ended) == [State.NOWHERE, State.NOWHERE]


def test_a_prompt_may_be_unwritten_as_long_as_no_later_one_is_written():
    """A producer that was killed within a group completes it when it is back, however late."""
    empty = Stage("generator", {}, {})
    group = InFlight(4, 2, 0, 0.0)
    assert located(group, empty, written_to=(4, 0)) == [State.ISSUED, State.ISSUED]
    assert located(group, empty, written_to=(4, 1)) == [State.NOWHERE, State.ISSUED]
    assert located(group, empty, written_to=(8, 0)) == [State.NOWHERE, State.NOWHERE]
    just_now = group._replace(since_s=NOW_S - 5)
    assert located(just_now, empty, written_to=(8, 0)) == [State.ISSUED, State.ISSUED]


def test_an_alarm_says_where_the_log_was_deleted_unread():
    prompts = {4: [Found(7, 0, 1.0)]}
    generator = Stage("generator", prompts, {0: Committed(9)})
    scorer = Stage("scorer", {}, {0: Committed(2)}, kept_from={0: 5})
    for path in ([generator, scorer], [Stage("generator", {}, {}), scorer]):
        [lost] = locate(InFlight(4, 1, 0, 0.0), path, producer="p", written_to=(8, 0), now_s=NOW_S)
        assert lost.state is State.NOWHERE
        assert "scorer has read to offset 2 and its input begins at 5 now" in lost.why
