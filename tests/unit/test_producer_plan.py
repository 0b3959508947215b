"""Group n is the same row for ever; environments mix by weight; admission keeps its bounds."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import run

from rollstream.services.prompt_producer.admission import Standing, over, room
from rollstream.services.prompt_producer.plan import Plan, last_group, mixing_cycle, request_seed

weights = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(st.integers(1, 9), st.integers(0, 50))
def test_one_source_comes_in_file_order(rows, n):
    assert Plan([rows], [1.0], None).place(n) == (0, n % rows, n // rows)


@given(st.integers(1, 9), st.integers(0, 3), st.integers(0, 5))
def test_each_shuffled_epoch_holds_every_row_once(rows, epoch, seed):
    plan = Plan([rows], [1.0], seed)
    places = [plan.place(n) for n in range(epoch * rows, (epoch + 1) * rows)]
    assert sorted(p.row_index for p in places) == list(range(rows))
    assert {p.epoch for p in places} == {epoch}


@given(weights)
def test_a_cycle_mixes_by_weight(given_weights):
    cycle = Counter(mixing_cycle([float(w) for w in given_weights]))
    total = sum(given_weights)
    for source, weight in enumerate(given_weights):
        assert abs(cycle[source] / cycle.total() - weight / total) < 0.02


@given(weights, st.data())
def test_every_source_goes_through_its_rows_in_order(given_weights, data):
    rows = [data.draw(st.integers(1, 5)) for _ in given_weights]
    plan = Plan(rows, [float(w) for w in given_weights], None)
    taken = [0] * len(rows)
    for n in range(60):
        place = plan.place(n)
        assert (place.epoch, place.row_index) == divmod(taken[place.source], rows[place.source])
        taken[place.source] += 1


def test_rows_end_with_the_epochs():
    plan = Plan([10], [1.0], None)
    assert last_group(run("eval"), plan) == 10
    assert last_group(run("eval", total_groups=4), plan) == 4
    assert last_group(run("sft", epochs=3), plan) == 30
    assert last_group(run("rl"), plan) is None


def test_siblings_have_different_seeds_and_a_retry_the_same():
    seeds = {request_seed(0, n, i) for n in range(50) for i in range(8)}
    assert len(seeds) == 400
    assert request_seed(0, 3, 1) == request_seed(0, 3, 1) != request_seed(1, 3, 1)
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize(("config", "now", "rows_end", "groups"), [
    (run(max_in_flight=16), Standing(0, 0, 0, 0, 0), None, 8),
    (run(max_in_flight=16), Standing(4, 8, 8, 4, 0), None, 4),
    (run(max_in_flight=500, max_staleness=1, batch_size=4), Standing(0, 0, 0, 0, 0), None, 4),
    (run(max_in_flight=500, total_steps=2, batch_size=4), Standing(0, 0, 0, 0, 0), None, 4),
    (run(max_in_flight=500, total_steps=2, batch_size=4), Standing(4, 2, 2, 1, 2), None, 1),
    (run("sft", max_in_flight=500, total_groups=3), Standing(3, 0, 0, 0, 2), None, 1),
    (run("eval", max_in_flight=500), Standing(0, 0, 0, 0, 0), 7, 7),
    (run("eval", max_in_flight=4), Standing(5, 4, 4, 2, 3), 7, 0),
    # What waits to be scored does not keep the generators from working.
    (run("sft", max_in_flight=4, total_groups=9), Standing(5, 10, 2, 5, 0), None, 1),
    (run(max_in_flight=8, max_staleness=1, batch_size=6), Standing(5, 10, 2, 5, 0), None, 1),
])
def test_admission(config, now, rows_end, groups):
    assert room(config, now, rows_end) == groups


@given(
    st.integers(0, 400), st.integers(0, 400), st.integers(0, 200), st.integers(0, 200),
    st.integers(0, 12),
)
def test_admission_never_passes_its_bounds(outstanding, running, in_flight, delivered, staleness):
    config = run(max_in_flight=64, max_staleness=staleness, batch_size=8, total_steps=30)
    running = min(running, outstanding)
    groups = room(config, Standing(0, outstanding, running, in_flight, delivered), None)
    assert groups >= 0
    assert groups == 0 or running + groups * 2 <= 64
    assert groups == 0 or outstanding + groups * 2 <= (staleness + 1) * 8
    assert groups == 0 or delivered + in_flight + groups <= 120


def test_a_run_is_over_only_when_nothing_is_in_flight():
    config = run("sft", total_groups=3)
    assert over(config, Standing(3, 2, 2, 1, 3), None, stopped=False) is None
    assert over(config, Standing(3, 0, 0, 0, 3), None, stopped=False) == "target reached"
    assert over(config, Standing(3, 0, 0, 0, 2), None, stopped=False) is None
    assert over(config, Standing(3, 0, 0, 0, 2), None, stopped=True) == "stopped"
    assert over(config, Standing(3, 0, 0, 0, 2), 3, stopped=False) == "all rows done"
