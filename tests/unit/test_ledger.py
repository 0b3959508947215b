"""The books against a naive model that keeps everything, at every prefix of random ledgers."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.shared.ledger import Ledger
from rollstream.shared.records import Ended, Issued, Outcome, Redriven

PARTITIONS = 3
LEAVES = ["trainer", "archive"]
numbers = st.integers(0, 11)
records = st.one_of(
    st.builds(Issued, n=numbers, k=st.just(4)),
    st.builds(Redriven, n=numbers, redrives=st.integers(1, 2)),
    st.builds(
        Ended, n=numbers, leaf=st.sampled_from(LEAVES), outcome=st.sampled_from(Outcome),
        reason=st.sampled_from(["stale", "zero_variance"]),
        reward_sum=st.sampled_from([0.5, 2.0]), reward_count=st.just(4),
        redrives=st.integers(0, 2),
    ),
)


class Model:
    """Every group's state at every leaf, by name."""

    def __init__(self) -> None:
        self.issued: dict[int, int] = {}
        self.ends: dict[tuple[str, int], Ended] = {}
        self.parks: dict[tuple[str, int], list[int]] = {}
        self.redrives: dict[tuple[str, int], list[int]] = {}

    def apply(self, record: Issued | Ended | Redriven) -> None:
        if isinstance(record, Issued):
            self.issued.setdefault(record.n, record.k)
        elif isinstance(record, Redriven):
            for leaf in LEAVES:
                self.redrives.setdefault((leaf, record.n), []).append(record.redrives)
        elif (key := (record.leaf, record.n)) not in self.ends:
            if record.outcome is Outcome.PARKED:
                self.parks.setdefault(key, []).append(record.redrives)
            else:
                self.ends[key] = record

    @property
    def parked(self) -> set[tuple[str, int]]:
        return {
            key for key, tries in self.parks.items()
            if key not in self.ends and max(tries) >= max(self.redrives.get(key, [0]))
        }

    def ended(self, leaf: str, outcome: Outcome) -> list[Ended]:
        return [e for (at, n), e in self.ends.items()
                if at == leaf and n in self.issued and e.outcome is outcome]


@given(st.lists(records, max_size=60))
@settings(max_examples=150, deadline=None)
def test_every_prefix_balances_and_equals_the_naive_model(prefix: list) -> None:
    ledger, model = Ledger(LEAVES, PARTITIONS), Model()
    for record in prefix:
        ledger.apply(record.n % PARTITIONS, record)
        model.apply(record)
        for books in ledger.books():
            delivered = model.ended(books.leaf, Outcome.DELIVERED)
            dropped = Counter(e.reason for e in model.ended(books.leaf, Outcome.DROPPED))
            parked = [n for at, n in model.parked if at == books.leaf and n in model.issued]
            assert books.balanced
            assert books.issued == len(model.issued)
            assert books.delivered == len(delivered)
            assert books.dropped == dropped
            assert books.parked == len(parked)
            assert books.reward_sum == sum(e.reward_sum for e in delivered)
            assert ledger.parked_groups(books.leaf) == sorted(parked)
            in_flight = sorted(
                n for n in model.issued
                if n not in parked and (books.leaf, n) not in model.ends
            )
            assert ledger.open_groups(books.leaf) == in_flight
            assert books.in_flight == len(in_flight)
            assert ledger.outstanding_samples(books.leaf) == 4 * len(in_flight)
        assert ledger.next_n == max(model.issued, default=-1) + 1
        assert ledger.missing == [n for n in range(ledger.next_n) if n not in model.issued]


@given(st.lists(records, max_size=40))
@settings(max_examples=60, deadline=None)
def test_reading_the_whole_ledger_twice_changes_no_end(whole: list) -> None:
    once, twice = Ledger(LEAVES, PARTITIONS), Ledger(LEAVES, PARTITIONS)
    for ledger, passes in ((once, 1), (twice, 2)):
        for record in whole * passes:
            ledger.apply(record.n % PARTITIONS, record)
    for one, two in zip(once.books(), twice.books(), strict=True):
        assert (one.issued, one.delivered, one.reward_sum) == (
            two.issued, two.delivered, two.reward_sum
        )
        assert one.dropped == two.dropped


def test_a_redriven_group_is_in_flight_again_and_ends_as_if_nothing_had_happened() -> None:
    ledger = Ledger(["report"], 1)
    ledger.apply(0, Issued(n=0, k=2))
    ledger.apply(0, Ended(n=0, leaf="report", outcome=Outcome.PARKED, reason="scoring"))
    assert ledger.books()[0].parked == 1
    assert ledger.outstanding_samples("report") == 0
    ledger.apply(0, Redriven(n=0))
    assert ledger.open_groups("report") == [0]
    assert ledger.set_aside("report", 0, 0)
    assert not ledger.set_aside("report", 0, 1)
    ledger.apply(0, Ended(n=0, leaf="report", outcome=Outcome.DELIVERED))
    assert ledger.books()[0].delivered == 1
    assert not ledger.set_aside("report", 0, 0)


def test_the_order_of_a_park_and_a_redrive_in_the_ledger_changes_nothing() -> None:
    """The redrive's record and what comes of it race: only the number of the try counts."""
    parked_again = Ended(n=0, leaf="report", outcome=Outcome.PARKED, redrives=1)
    for order in permutations([
        Ended(n=0, leaf="report", outcome=Outcome.PARKED), Redriven(n=0), parked_again,
        Redriven(n=0, redrives=1),
    ]):
        ledger = Ledger(["report", "other"], 1)
        ledger.apply(0, Issued(n=0, k=2))
        for record in order:
            ledger.apply(0, record)
        assert ledger.parked_groups("report") == [0]
        assert ledger.redrives("report", 0) == 1
        ledger.apply(0, Redriven(n=0, redrives=2, leaves=["report"]))
        assert ledger.open_groups("report") == [0]


def test_a_redrive_concerns_the_leaves_of_its_branch() -> None:
    ledger = Ledger(LEAVES, 1)
    ledger.apply(0, Issued(n=0, k=2))
    for leaf in LEAVES:
        ledger.apply(0, Ended(n=0, leaf=leaf, outcome=Outcome.PARKED))
    ledger.apply(0, Redriven(n=0, leaves=["archive"]))
    assert ledger.open_groups("archive") == ledger.parked_groups("trainer") == [0]
    assert ledger.open_groups("trainer") == ledger.parked_groups("archive") == []


def test_an_end_from_an_earlier_log_counts_once_its_group_is_issued() -> None:
    ledger = Ledger(["dataset"], 2)
    ledger.apply(1, Ended(n=3, leaf="dataset", outcome=Outcome.DELIVERED))
    assert ledger.ended_unissued("dataset") == [3]
    assert ledger.books()[0].balanced
    ledger.apply(1, Issued(n=3, k=8, restored=True))
    assert ledger.ended_unissued("dataset") == []
    assert ledger.books()[0].delivered == 1
    assert ledger.restored == 1


def test_a_record_in_the_wrong_partition_or_of_an_unknown_leaf_is_left_aside() -> None:
    ledger = Ledger(["dataset"], 2)
    ledger.apply(0, Issued(n=1, k=8))
    ledger.apply(0, Ended(n=0, leaf="nobody", outcome=Outcome.DELIVERED))
    assert ledger.strangers == 2
    assert ledger.next_n == 0


def test_memory_does_not_grow_with_what_has_ended() -> None:
    ledger = Ledger(["dataset"], 4)
    for n in range(20_000):
        ledger.apply(n % 4, Issued(n=n, k=8))
        ledger.apply(n % 4, Ended(n=n, leaf="dataset", outcome=Outcome.DELIVERED))
    assert ledger.open_groups("dataset") == []
    assert [seen.watermark for seen in ledger.ended_groups("dataset")] == [5000] * 4
    assert all(seen.state().complete == b"" for seen in ledger.ended_groups("dataset"))


def test_a_group_is_open_since_it_was_issued_or_put_back() -> None:
    ledger = Ledger(["leaf"], 1)
    ledger.apply(0, Issued(n=0, k=4), 10.0)
    assert (ledger.open_since_s("leaf", 0), ledger.samples("leaf", 0)) == (10.0, 4)
    ledger.apply(0, Ended(n=0, leaf="leaf", outcome=Outcome.PARKED), 20.0)
    assert ledger.open_since_s("leaf", 0) is None
    ledger.apply(0, Redriven(n=0), 30.0)
    assert ledger.open_since_s("leaf", 0) == 30.0
    ledger.apply(0, Ended(n=0, leaf="leaf", outcome=Outcome.DELIVERED), 40.0)
    assert (ledger.open_since_s("leaf", 0), ledger.samples("leaf", 0)) == (None, 0)
