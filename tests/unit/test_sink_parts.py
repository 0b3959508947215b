"""Parts on a real disk: exclusive, chained, and never believed when damaged."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rollstream.services.sink.decide import BELOW_MIN_SCORE, Decider, Decision
from rollstream.services.sink.parts import (
    Folder,
    FullLine,
    Line,
    PartError,
    in_order,
    read_lines,
)
from rollstream.shared.bus import Lost
from rollstream.shared.durable import replacing
from rollstream.shared.records import EnvRef, Kind, Outcome, Row, Sample, Scored, Stop
from rollstream.shared.seen import Seen, Unit

TOPIC = "rs.r1.sft.scored"


def scored(n: int, rewards: list[float | None], kind: Kind = Kind.SCORED) -> Scored:
    samples = [Sample(i=i, stop=Stop.STOP, reward=r) for i, r in enumerate(rewards)]
    return Scored(
        run="r1", pipeline="sft", n=n, k=len(rewards), env=EnvRef(id="sums"),
        row=Row(prompt=[{"role": "user", "content": f"row {n}"}]), kind=kind, samples=samples,
    )


def folder(out: Path, log_id: str = "now", *, keep_dropped: bool = False) -> Folder:
    return Folder(out, "dataset", topic=TOPIC, log_id=log_id, keep_dropped=keep_dropped)


def delivered(n: int) -> Decision:
    return Decision(n, Outcome.DELIVERED, "", scored(n, [1.0, 0.0]))


def test_a_chain_is_followed_from_the_start_to_the_offset_to_go_on_from(tmp_path: Path) -> None:
    parts = folder(tmp_path)
    parts.write(1, 0, 5, [delivered(1), delivered(3)])
    parts.write(1, 5, 6, [delivered(5)])
    parts.write(0, 0, 2, [delivered(0)])
    chain = list(parts.chain(1))
    assert [(p.header.start, p.header.end) for p in chain] == [(0, 5), (5, 6)]
    assert [line.n for p in chain for line in read_lines(p, Line)] == [1, 3, 5]
    assert [p.header.start for p in parts.chain(1, 5)] == [5]


def test_a_part_that_exists_is_somebody_elses(tmp_path: Path) -> None:
    folder(tmp_path).write(0, 0, 2, [delivered(0)])
    with pytest.raises(Lost, match="not ours"):
        folder(tmp_path).write(0, 0, 3, [delivered(0), delivered(1)])
    assert [p.header.end for p in folder(tmp_path).chain(0)] == [2]
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_part_left_unfinished_is_no_part_and_is_removed_by_the_next_owner(tmp_path: Path) -> None:
    parts = folder(tmp_path)
    parts.write(0, 0, 2, [delivered(0)])
    aside = tmp_path / "parts/dataset/now/.0-00000000000000000002.abcd.tmp"
    aside.write_text("half a li")
    assert [p.header.end for p in parts.chain(0)] == [2]
    parts.take_over(0)
    assert not aside.exists()


def test_a_gap_in_the_chain_is_an_error(tmp_path: Path) -> None:
    parts = folder(tmp_path)
    parts.write(0, 0, 2, [delivered(0)])
    parts.write(0, 3, 4, [delivered(1)])
    with pytest.raises(PartError, match="a part is missing"):
        list(parts.chain(0))


@pytest.mark.parametrize("damage", [
    lambda data: data[:-20],
    lambda data: data.replace(b'"n":1', b'"n":"1"'),
    lambda data: b"\n".join(data.split(b"\n")[:-2]) + b"\n",
    lambda data: data + data.split(b"\n")[-2] + b"\n",
], ids=["torn", "changed", "a line less", "a line more"])
def test_a_damaged_part_is_an_error(tmp_path: Path, damage) -> None:
    part = folder(tmp_path).write(0, 0, 2, [delivered(0), delivered(1)])
    part.path.write_bytes(damage(part.path.read_bytes()))
    with pytest.raises(PartError):
        [list(read_lines(p, FullLine)) for p in folder(tmp_path).chain(0)]


def test_a_part_of_another_run_is_an_error(tmp_path: Path) -> None:
    folder(tmp_path).write(0, 0, 2, [delivered(0)])
    other = Folder(tmp_path, "dataset", topic="rs.r2.sft.scored", log_id="now")
    with pytest.raises(PartError, match="not this run's"):
        list(other.chain(0))
    other = Folder(tmp_path, "dataset", topic="rs.r2.sft.scored", log_id="later")
    with pytest.raises(PartError, match="its own folder"):
        other.restored()


def test_earlier_logs_say_what_ended_and_the_first_end_counts(tmp_path: Path) -> None:
    folder(tmp_path, "a").write(0, 0, 9, [
        delivered(0), Decision(1, Outcome.DROPPED, "stale"), Decision(2, Outcome.PARKED, "judge"),
    ])
    folder(tmp_path, "b").write(0, 0, 1, [delivered(1), delivered(2)])
    ends = folder(tmp_path, "c").restored()
    assert {n: line.outcome for n, line in ends.items()} == {
        0: Outcome.DELIVERED, 1: Outcome.DROPPED, 2: Outcome.DELIVERED
    }
    assert ends[0].ended("dataset").reward_sum == 1.0


def test_lines_come_in_order_of_groups_each_once(tmp_path: Path) -> None:
    folder(tmp_path, "a").write(1, 0, 1, [delivered(3)])
    now = folder(tmp_path)
    now.write(0, 0, 3, [delivered(4), delivered(0)])
    now.write(1, 0, 3, [delivered(3), delivered(1), Decision(5, Outcome.DROPPED, "x")])
    lines = list(in_order(now.everything(2), frozenset({Outcome.DELIVERED})))
    assert [line.n for line in lines] == [0, 1, 3, 4]
    assert all(line.group and line.group.n == line.n for line in lines)


def test_a_dropped_groups_record_is_kept_where_asked_for(tmp_path: Path) -> None:
    dropped = Decision(0, Outcome.DROPPED, "incomplete", scored(0, [None], Kind.DROPPED))
    for keep in (False, True):
        parts = folder(tmp_path / str(keep), keep_dropped=keep)
        line, = read_lines(parts.write(0, 0, 1, [dropped]), FullLine)
        assert (line.group is not None) == keep


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    with replacing(path) as aside:
        aside.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as aside:  # noqa: PT012
        aside.write_text("ne")
        raise RuntimeError("killed here")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.json"]


def outcome(decision: Decision | None) -> tuple[str, str] | None:
    return None if decision is None else (decision.outcome.value, decision.reason)


def test_the_first_settling_record_decides_and_parked_does_not_settle() -> None:
    decider = Decider(Seen(1))
    assert outcome(decider.decide(scored(0, [1.0], Kind.PARKED))) == ("parked", "parked")
    assert decider.decide(scored(0, [1.0], Kind.PARKED)) is None
    assert outcome(decider.decide(scored(0, [1.0]))) == ("delivered", "")
    assert decider.decide(scored(0, [1.0], Kind.DROPPED)) is None
    assert decider.decide(scored(0, [1.0], Kind.PARKED)) is None
    assert decider.seen.has(Unit(0))


def test_min_score_keeps_good_samples_and_drops_a_group_without_one() -> None:
    decider = Decider(Seen(1), min_score=0.5)
    some = decider.decide(scored(0, [1.0, 0.2, None, 0.5]))
    assert some is not None
    assert some.group is not None
    assert [s.i for s in some.group.samples] == [0, 3]
    assert some.ended("dataset").reward_sum == 1.5
    none = decider.decide(scored(1, [0.1, None]))
    assert none is not None
    assert outcome(none) == ("dropped", BELOW_MIN_SCORE)
    assert none.ended("dataset").reward_count == 0


def test_an_unreadable_record_ends_its_group_by_its_headers_alone() -> None:
    decider = Decider(Seen(1))
    assert outcome(decider.decide_undecodable([("rs-group", b"7")])) == ("dropped", "undecodable")
    assert decider.decide_undecodable([("rs-group", b"7")]) is None
    assert decider.decide_undecodable([]) is None


def test_a_line_is_readable_without_its_group() -> None:
    full = FullLine(n=1, outcome=Outcome.DELIVERED, group=scored(1, [0.5]))
    assert msgspec.json.decode(msgspec.json.encode(full), type=Line).n == 1
