"""What must hold after any hurt: books, files, ledger and log told against each other."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from rig import Rig

from rollstream.shared.records import Ended, Group, Issued, Kind, Outcome, Rollout
from rollstream.shared.runs import RunConfig


class Reckoning(NamedTuple):
    """What a run came to; `again` are rollouts that were generated more than once."""

    delivered: int
    lost: int
    doubled: int
    torn: int
    again: int


async def reckon(
    made: Rig, config: RunConfig, *, groups: int, written: str = "scored"
) -> Reckoning:
    """Count everything of a dataset run of `groups` rows, each once. Raises AssertionError.

    `written`: the topic that the sink reads. Each row's question is its own (`judge_env`), and all
    samples of one scoring have the same reward: a group with two was mixed of two scorings.
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
    rollouts = Counter(
        (record.n, record.i) for record in await made.records(config, "rollouts")
        if isinstance(record, Rollout)
    )
    assert set(issued) == set(range(groups)), "a group was never issued"
    assert max(issued.values()) == 1, "a group was issued twice"
    assert set(rollouts) == {(n, i) for n in range(groups) for i in range(config.group_size)}
    assert books.delivered == len(delivered) == len(lines), "files and ledger differ"
    return Reckoning(
        delivered=books.delivered,
        lost=len(expected - set(questions)),
        doubled=sum(count - 1 for count in questions.values()),
        torn=await _torn(made, config, written) + sum(
            len(set(line["scores"])) != 1 or len(line["scores"]) != config.group_size
            for line in lines
        ),
        again=sum(count - 1 for count in rollouts.values()),
    )


async def _torn(made: Rig, config: RunConfig, written: str) -> int:
    """Group records that are not whole, or whose samples come from two scorings."""
    groups = await made.records(config, written)
    return sum(
        len(group.samples) != group.k or len({sample.reward for sample in group.samples}) != 1
        for group in groups if isinstance(group, Group) and group.kind is Kind.SCORED
    )
