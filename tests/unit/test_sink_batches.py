"""Which groups make a batch, and which of two sinks' offers counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.services.sink import batch_file
from rollstream.services.sink.batch_file import BatchLine
from rollstream.services.sink.batches import BatchBook, Pool
from rollstream.services.sink.parts import PartError
from rollstream.shared.arrays import pack
from rollstream.shared.control import Acked, Offered, PolicyVersion
from rollstream.shared.records import (
    Ended,
    EnvRef,
    Outcome,
    Row,
    Sample,
    Scored,
    Sequence,
    Stop,
    VersionSpan,
)

one = pack([1], "int32")


def group(n: int, version: int | None, k: int = 8) -> Scored:
    spans = [] if version is None else [VersionSpan(version, 0, 1)]
    sequence = Sequence(tokens=one, mask=pack([1], "uint8"), versions=spans)
    return Scored(
        run="r", pipeline="rl", n=n, k=k, env=EnvRef(id="e"), row=Row(prompt=[]),
        samples=[Sample(i=i, stop=Stop.STOP, reward=1.0, sequences=[sequence]) for i in range(k)],
    )


def numbers(groups: list | None) -> list[int] | None:
    return None if groups is None else [g.n for g in groups]


def test_oldest_version_first_then_number() -> None:
    pool = Pool(16, 8)
    for n, version in [(0, 5), (7, 4), (3, 4), (1, 6)]:
        pool.add(group(n, version))
    assert numbers(pool.reserve_next()) == [3, 7]
    assert numbers(pool.reserve_next()) == [0, 1]
    assert pool.reserve_next() is None


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([2, 4, 8])), max_size=30))
@settings(max_examples=100, deadline=None)
def test_batches_are_exact_and_no_group_is_split_lost_or_in_two(groups: list) -> None:
    pool = Pool(16, 100)
    for n, (version, k) in enumerate(groups):
        pool.add(group(n, version, k))
    seen: list[int] = []
    while (batch := pool.reserve_next()) is not None:
        assert sum(g.k for g in batch) == 16
        seen += [g.n for g in batch]
    left = pool.take_all()
    assert sorted(seen + [g.n for g in left]) == list(range(len(groups)))


def test_a_group_is_stale_when_more_than_the_bound_behind() -> None:
    pool = Pool(8, 2)
    for n, version in [(0, 1), (1, 2), (2, 3), (3, None)]:
        pool.add(group(n, version))
    assert numbers(pool.take_stale(4)) == [0]
    assert numbers(pool.take_stale(5)) == [1]
    assert len(pool) == 2


def test_a_reserved_group_is_neither_stale_nor_added_again() -> None:
    pool = Pool(8, 0)
    pool.add(group(0, 0))
    assert numbers(pool.reserve([0])) == [0]
    pool.add(group(0, 0))
    assert pool.take_stale(9) == []
    assert pool.reserve_next() is None
    assert pool.reserve([0, 1]) is None
    assert pool.release(0) is not None
    assert pool.release(0) is None


def test_the_first_offer_of_an_id_counts() -> None:
    book = BatchBook()
    book.apply(3, Offered(batch_id=0, groups=[1, 2]))
    book.apply(5, Offered(batch_id=0, groups=[3, 4]))
    assert book.batches[0].offset == 3
    assert book.unacknowledged()[0].groups == [1, 2]
    book.apply(6, Acked(batch_id=0))
    assert book.unacknowledged() == []
    assert book.next_id == 1


def test_announced_versions_replace_implied_ones() -> None:
    book = BatchBook()
    assert not book.registered
    book.apply(0, PolicyVersion(version=4, implied=True))
    assert (book.version, book.registered) == (4, True)
    book.apply(1, PolicyVersion(version=2))
    book.apply(2, PolicyVersion(version=9, implied=True))
    assert (book.version, book.announced) == (2, True)


def line(kind: str, batch_id: int, *ns: int, log_id: str = "a") -> BatchLine:
    ends = [Ended(n=n, leaf="trainer", outcome=Outcome.DELIVERED, reward_sum=2.0) for n in ns]
    return BatchLine(log_id=log_id, batch_id=batch_id, kind=kind, ends=ends)  # type: ignore


def test_what_was_acknowledged_in_an_earlier_log_is_delivered(tmp_path: Path) -> None:
    path = tmp_path / "run" / "batches.jsonl"
    for each in (line("offered", 0, 1, 2), line("acked", 0), line("offered", 1, 3),
                 line("offered", 1, 4), line("acked", 1), line("offered", 2, 5)):
        batch_file.append(path, each)
    lines = batch_file.read(path)
    assert [e.n for e in batch_file.delivered_before(lines, "b")] == [1, 2, 4]
    assert batch_file.batches_before(lines, "b") == 2
    assert batch_file.delivered_before(lines, "a") == []


def test_a_line_that_was_cut_off_is_removed_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "batches.jsonl"
    batch_file.append(path, line("offered", 0, 1))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"log_id":"a","ba')
    assert len(batch_file.read(path)) == 1
    batch_file.append(path, line("acked", 0))
    assert len(batch_file.read(path)) == 2
    path.write_bytes(b"nonsense\n" + whole)
    with pytest.raises(PartError, match="damaged"):
        batch_file.read(path)
