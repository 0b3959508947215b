"""A correct system never raises an alarm; each kind of loss raises one that names the sample."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

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


class Line:
    """A line of a generator, a scorer, a teacher and a leaf over one partition, as logs."""

    def __init__(self) -> None:
        self.topics: list[list[tuple[int, int | None]]] = [[], [], [], []]
        self.ended: set[int] = set()
        self.issued = 0
        self.done: list[set[int]] = [set(), set(), set(), set()]

    def issue(self) -> None:
        self.topics[0] += [(self.issued, i) for i in range(K)]
        self.issued += 1

    def work(self, stage: int, at: int) -> None:
        """The stage finishes one of the records that are open there, in any order."""
        topic, done = self.topics[stage], self.done[stage]
        ready = [o for o in range(len(topic)) if o not in done and self._ready(stage, topic[o][0])]
        if not ready:
            return
        n, i = topic[ready[at % len(ready)]]
        unit = [o for o, (m, j) in enumerate(topic) if m == n and (stage == 1 or j == i)]
        if stage == 3:
            self.ended.add(n)
        else:
            self.topics[stage + 1].append((n, i if stage == 0 else None))
        done |= set(unit)

    def _ready(self, stage: int, n: int) -> bool:
        return stage != 1 or sum(m == n for m, _ in self.topics[1]) == K

    def committed(self, stage: int) -> int:
        topic, done = self.topics[stage], self.done[stage]
        return next((o for o in range(len(topic)) if o not in done), len(topic))

    def places(self, *, hints: bool = True) -> list[Place]:
        path = []
        for stage, name in enumerate(["generator", "scorer", "teacher-distiller", "sink:dataset"]):
            found: dict[int, list[Found]] = {}
            for offset, (n, i) in enumerate(self.topics[stage]):
                if n >= 0:
                    found.setdefault(n, []).append(Found(offset, i, 10.0 * stage))
            read_to = len(self.topics[stage]) if hints else None
            path.append(Stage(name, found, {0: Committed(self.committed(stage), read_to)},
                              assembles=stage == 1, leaf=stage == 3))
        return [
            place for n in range(self.issued) if n not in self.ended
            for place in locate(InFlight(n, K, 0, 0.0), path, producer="prompt-producer",
                                newest_n=self.issued - 1, now_s=NOW_S)
        ]


steps = st.lists(
    st.one_of(st.just("issue"), st.tuples(st.integers(0, 3), st.integers(0, 9))), max_size=80
)


def run_line(history: list) -> Line:
    line = Line()
    for step in history:
        if step == "issue":
            line.issue()
        else:
            line.work(*step)
    return line


@given(steps, st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_correct_line_never_raises_an_alarm(history: list, hints: bool):
    line = run_line(history)
    places = line.places(hints=hints)
    assert not [place for place in places if place.state is State.NOWHERE]
    assert len(places) == K * (line.issued - len(line.ended))
    rows = table(places, ["generator", "scorer", "teacher-distiller", "sink:dataset"], NOW_S)
    assert sum(sum(row.counts.values()) for row in rows) == len(places)


@given(steps, st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=300, deadline=None)
def test_a_record_that_was_lost_is_named(history: list, stage: int, at: int):
    """Whatever a stage has written is taken out of its topic, its input committed."""
    line = run_line(history)
    topic = line.topics[stage]
    gone = [o for o, (n, _) in enumerate(topic) if n not in line.ended
            and not any(m == n for later in line.topics[stage + 1:] for m, _ in later)]
    if not gone:
        return
    offset = gone[at % len(gone)]
    n, i = topic[offset]
    topic[offset] = (-1, None)
    line.done[stage].add(offset)
    passed = {(n, j) for j in range(K) if i in (None, j)
              for o, (m, at_j) in enumerate(line.topics[stage - 1])
              if m == n and at_j in (None, j) and o < line.committed(stage - 1)}
    lost = [p for p in line.places() if p.state is State.NOWHERE]
    assert {(p.n, p.i) for p in lost} == passed
    assert all("has passed its record" in p.why for p in lost)


def located(group: InFlight, *path: Stage, newest_n: int = 9) -> list[State]:
    places = locate(group, path, producer="p", newest_n=newest_n, now_s=NOW_S)
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


def test_a_prompt_may_be_unwritten_for_a_while_but_not_for_ever():
    empty = Stage("generator", {}, {})
    assert located(InFlight(4, 1, 0, 0.0), empty, newest_n=3) == [State.ISSUED]
    assert located(InFlight(4, 1, 0, 0.0), empty, newest_n=8) == [State.NOWHERE]
    assert located(InFlight(4, 1, 0, NOW_S - 5), empty, newest_n=8) == [State.ISSUED]
