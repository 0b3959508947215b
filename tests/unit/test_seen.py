"""A watermark and sparse numbers remember exactly what a set of all ids would."""

from hypothesis import given
from hypothesis import strategies as st

from rollstream.shared.seen import Seen, Unit

P = 4
ns = st.integers(0, 30).map(lambda m: m * P + 1)


@given(st.lists(ns), st.lists(ns))
def test_groups_are_remembered_like_a_set(added, asked):
    seen = Seen(P)
    for n in added:
        seen.add_group(n)
    assert all(seen.has(Unit(n)) == (n in added) for n in asked)
    assert len(seen) == len(set(added))


@given(st.lists(st.tuples(ns, st.integers(0, 2))), st.tuples(ns, st.integers(0, 2)))
def test_samples_are_remembered_like_a_set(added, asked):
    seen = Seen(P)
    for n, i in added:
        seen.add_sample(n, i, k=3)
    assert seen.has(Unit(*asked)) == (asked in added)
    whole = {n for n, _ in added if {(n, 0), (n, 1), (n, 2)} <= set(added)}
    assert all(seen.has(Unit(n)) for n in whole)
    assert not any(seen.has(Unit(n)) for n, _ in added if n not in whole)


@given(st.lists(st.one_of(ns, st.tuples(ns, st.integers(0, 2)))), st.lists(ns))
def test_a_state_gives_an_equal_one_back(added, parked):
    seen = Seen(P)
    for item in added:
        seen.add(Unit(*item) if isinstance(item, tuple) else Unit(item), 3)
    for n in parked:
        seen.park(n)
    again = Seen(P, seen.state())
    assert again.state() == seen.state()
    assert all(again.is_parked(n) == seen.is_parked(n) for n in parked)
    assert not any(again.is_parked(n, redrives=1) for n in parked)


def test_a_long_run_costs_no_memory():
    seen = Seen(P)
    for m in range(10_000):
        seen.add_group(m * P)
    assert seen.watermark == 10_000
    assert seen.state().complete == b""


def test_parked_does_not_settle():
    seen = Seen(P)
    seen.park(5)
    assert seen.is_parked(5)
    assert not seen.has(Unit(5))
    seen.add_group(5)
    assert seen.has(Unit(5))
    assert not seen.is_parked(5)


def test_a_park_covers_its_own_try_and_earlier_ones():
    seen = Seen(P)
    seen.park(5, 1)
    seen.park(5, 0)
    assert [seen.is_parked(5, redrives) for redrives in (0, 1, 2)] == [True, True, False]
