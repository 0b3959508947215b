"""What must hold after any hurt: books, files, ledger and log told against each other."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from rig import Rig

from rollstream.shared.records import Ended, Group, Issued, Kind, Outcome, Rollout
from rollstream.shared.runs import RunConfig


class Reckoning(NamedTuple):
    """What a run came to."""

    delivered: int
    lost: int
    """Rows that no file holds."""
    doubled: int
    """Rows that a file holds a second time."""
    torn: int
    """Groups that are not whole, that mix two scorings, or that are not the first scoring."""
    again: int
    """Rollouts that the log holds more than once; the first counts."""
    repeated: int
    """Those of them that were begun after the first was in the log: finished work done again."""


async def reckon(made: Rig, config: RunConfig, *, groups: int) -> Reckoning:
    """Count everything of a dataset run of `groups` rows, each once. Raises AssertionError.

    Each row's question is its own (`judge_env`), and all samples of one scoring have the same
    reward, drawn anew for each scoring: a group with two was mixed of two scorings.
    """
    books = await made.books(config)
    assert books.balanced, books
    assert books.in_flight == 0, books
    lines = made.dataset(config)
    questions = Counter(line["messages"][0][0]["content"] for line in lines)
    expected = {f"Say {n}." for n in range(groups)}
    ledger = await made.records(config, "ledger")
    issued = Counter(record.n for record in ledger if isinstance(record, Issued))
    ends = [record for record in ledger if isinstance(record, Ended)]
    delivered = {end.n for end in ends if end.outcome is Outcome.DELIVERED}
    rollouts = [
        (sent_s, record) for sent_s, record in await made.stamped(config, "rollouts")
        if isinstance(record, Rollout)
    ]
    samples = {(record.n, record.i) for _, record in rollouts}
    assert set(issued) == set(range(groups)), "a group was never issued"
    assert max(issued.values()) == 1, "a group was issued twice"
    assert samples == {(n, i) for n in range(groups) for i in range(config.group_size)}
    assert books.delivered == len(delivered) == len(lines), "files and ledger differ"
    return Reckoning(
        delivered=books.delivered,
        lost=len(expected - set(questions)),
        doubled=sum(count - 1 for count in questions.values()),
        torn=_torn(await made.records(config, "scored"), lines),
        again=len(rollouts) - len(samples),
        repeated=_repeated(rollouts),
    )


def _torn(scored: list[Any], lines: list[dict[str, Any]]) -> int:
    """Lines of the file that are not, whole, the first scoring of their group in the log."""
    first: dict[str, list[float | None]] = {}
    for group in scored:
        if isinstance(group, Group) and group.kind is Kind.SCORED:
            first.setdefault(group.row.question, [sample.reward for sample in group.samples])
            assert len(group.samples) == group.k, f"group {group.n} is not whole"
    return sum(
        line["scores"] != first[line["messages"][0][0]["content"]] or len(set(line["scores"])) != 1
        for line in lines
    )


def _repeated(rollouts: list[tuple[float, Rollout]]) -> int:
    """Rollouts that were begun when the log held one of the same sample already."""
    first_s: dict[tuple[int, int], float] = {}
    count = 0
    for sent_s, rollout in rollouts:
        begun_s = sent_s - rollout.duration_s
        count += begun_s > first_s.setdefault((rollout.n, rollout.i), sent_s)
    return count
