"""A run's progress as a pure fold of its topics: per stage done, in flight, rate, mean reward."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from rollstream.shared.codec import Headers, Undecodable, decode, header_int
from rollstream.shared.ledger import Ledger
from rollstream.shared.records import Ended, Group, Issued, Kind, Redriven
from rollstream.shared.routes import leaves
from rollstream.shared.runs import RunConfig

RATE_WINDOW_S = 10.0


@dataclass
class Flow:
    """What one output of a run has carried, in samples."""

    samples: int = 0
    dropped: int = 0
    rewards: float = 0.0
    rewarded: int = 0
    recent: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, samples: int, now_s: float) -> None:
        self.samples += samples
        self.recent.append((now_s, samples))

    def rate(self, now_s: float) -> float:
        """Samples per second over the last seconds."""
        while self.recent and self.recent[0][0] < now_s - RATE_WINDOW_S:
            self.recent.popleft()
        if not self.recent:
            return 0.0
        span_s = max(1.0, now_s - self.recent[0][0])
        return sum(samples for _, samples in self.recent) / span_s


class StageLine(NamedTuple):
    """One line of the progress table, in samples."""

    stage: str
    done: int
    in_flight: int
    rate: float
    mean_reward: float | None
    total: int | None
    """Where the end is known."""


class RunProgress:
    """Follows the topics of one run; a duplicate is counted once per (n, i)."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.flows = {route.output: Flow() for route in config.stages if route.output}
        self.ledger = Ledger(leaves(config.stages), config.partitions)
        self._seen: dict[str, set[tuple[int, int]]] = {name: set() for name in self.flows}
        self.last: str = ""

    def record(self, kind: str, value: bytes | None, headers: Headers, now_s: float) -> None:
        """Take a record of one of the run's outputs in."""
        n, k = header_int(headers, "rs-group"), header_int(headers, "rs-k")
        i = header_int(headers, "rs-sample")
        key = (n or 0, -1 if i is None else i)
        if n is None or k is None or key in self._seen[kind]:
            return
        self._seen[kind].add(key)
        flow = self.flows[kind]
        flow.add(k if i is None else 1, now_s)
        if i is None:
            self._group(flow, value, headers)

    def _group(self, flow: Flow, value: bytes | None, headers: Headers) -> None:
        try:
            group = decode(value, headers)
        except Undecodable:
            return
        if not isinstance(group, Group):
            return
        flow.dropped += group.k if group.kind is not Kind.SCORED else 0
        for sample in group.samples:
            if sample.reward is not None:
                flow.rewards += sample.reward
                flow.rewarded += 1
                self.last = _line(group.row.question, sample.completion, sample.reward)

    def ended(self, partition: int, value: bytes | None, headers: Headers) -> None:
        """Take a record of the ledger in."""
        try:
            record = decode(value, headers)
        except Undecodable:
            return
        if isinstance(record, Issued | Ended | Redriven):
            self.ledger.apply(partition, record)

    def total_samples(self) -> int | None:
        """How many samples the whole run will be, where that can be told."""
        config = self.config
        size = config.group_size
        if config.pipeline == "rl" and config.total_steps:
            return config.total_steps * config.batch_size
        rows = sum(source.rows for source in config.environments)
        if config.pipeline == "eval":
            return min(config.total_groups or rows, rows * (config.epochs or 1)) * size
        if config.total_groups:
            return config.total_groups * size
        return rows * config.epochs * size if config.epochs else None

    def lines(self, now_s: float) -> list[StageLine]:
        """The table: one line a stage, in the order of the routing."""
        total = self.total_samples()
        table = []
        for route in self.config.stages:
            upstream = self.flows[route.input].samples if route.input else 0
            if route.output:
                flow = self.flows[route.output]
                done, rate = flow.samples, flow.rate(now_s)
                mean = flow.rewards / flow.rewarded if flow.rewarded else None
            else:
                books = next(b for b in self.ledger.books() if b.leaf == route.leaf)
                done = books.issued_samples - books.in_flight_samples
                rate = 0.0
                mean = books.reward_sum / books.reward_count if books.reward_count else None
            waiting = max(0, upstream - done) if route.input else 0
            table.append(StageLine(route.instance, done, waiting, rate, mean, total))
        return table


def _line(question: str, completion: list[dict], reward: float) -> str:
    text = str(completion[-1].get("content") or "") if completion else ""
    return f"{question.strip()[-40:]!r} -> {text.strip()[:40]!r}  r={reward:g}"
