"""Groups close with their first k distinct samples; deadlines count in log time."""

from hypothesis import given
from hypothesis import strategies as st

from rollstream.shared.groups import Assembler


@given(st.integers(1, 4), st.data())
def test_each_group_closes_once_with_its_first_members(k, data):
    arrivals = data.draw(st.permutations(
        [(n, i) for n in range(4) for i in range(k)] * data.draw(st.integers(1, 2))
    ))
    assembler: Assembler[int] = Assembler(60)
    closed, first = {}, {}
    for at, (n, i) in enumerate(arrivals):
        if n in closed:
            continue
        first.setdefault((n, i), at)
        whole = assembler.add(n, i, k, at, timestamp_s=at)
        if whole is not None:
            closed[n] = whole
    assert set(closed) == set(range(4))
    assert all(members == [first[n, i] for i in range(k)] for n, members in closed.items())
    assert len(assembler) == 0


def test_an_index_outside_of_the_group_is_ignored():
    assembler: Assembler[str] = Assembler(60)
    assert assembler.add(1, 5, 2, "stranger", timestamp_s=0) is None
    assert assembler.members == 0


def test_a_group_expires_only_at_the_end_of_the_log():
    assembler: Assembler[str] = Assembler(deadline_s=100)
    assembler.add(1, 0, 2, "a", timestamp_s=1000)
    # Two hours of wall time while the reader was down: the log says one second.
    assembler.add(2, 0, 2, "b", timestamp_s=1001)
    assert assembler.expired(now_s=9000) == []
    assembler.at_end(now_s=9000)
    assert assembler.expired(now_s=9050) == []
    assert [group.n for group in assembler.expired(now_s=9099)] == [1]
    # News from the log stop the wall clock again.
    assembler.add(3, 0, 2, "c", timestamp_s=1002)
    assert assembler.expired(now_s=99_000) == []
