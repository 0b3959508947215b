"""The records that travel: one Struct a kind, tagged, versioned, owned by this project.

Prompt and Rollout are one per *sample*. From the scorer on there is one record per *group*, its
samples as a list, so that a group can't be torn. New fields always get a default: what a released
version wrote decodes for ever (`tests/unit/golden`).

Identity: a group is number `n` of its run, a sample is `(n, i)` with `i < k`. Partition = n mod P.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from rollstream.shared.arrays import Packed
from rollstream.shared.control import (
    Acked,
    Answer,
    Finished,
    Offered,
    PolicyLive,
    PolicyVersion,
)

SCHEMA_VERSION = 1
RETENTION = "retention"
"""Failure type and drop reason of what its topic deleted before it was read."""

Message = dict[str, Any]
"""A chat message as OpenAI's API has it: role, content, and tool_calls where there are some."""


class Stop(StrEnum):
    """Why a rollout ended."""

    STOP = "stop"
    """The model ended its turn, or a stop string or a turn limit did."""
    LENGTH = "length"
    """The completion budget was used up: the model's doing, so it is scored."""
    TOOL = "tool"
    """The model called a tool that ends the rollout."""
    TOO_LONG = "too_long"
    """The prompt no longer fits the context: scored."""
    TIMEOUT = "timeout"
    """The sample's deadline passed: reward null."""
    ERROR = "error"
    """The server or the environment failed after all attempts: reward null."""
    CANCELLED = "cancelled"
    """The run was stopped or the server aborted it: reward null."""
    REFUSED = "refused"
    """A content filter refused: reward null."""

    @property
    def scored(self) -> bool:
        """Whether the model is answerable for this end, so that it may get a reward."""
        return self in (Stop.STOP, Stop.LENGTH, Stop.TOOL, Stop.TOO_LONG)


class Kind(StrEnum):
    """What a group record says of its group."""

    SCORED = "scored"
    DROPPED = "dropped"
    PARKED = "parked"
    """Set aside in the dead letters: not final, a redrive puts it back in flight."""


class Failure(msgspec.Struct, frozen=True):
    """A failure as data: what kind, and what it said."""

    type: str
    message: str


class EnvRef(msgspec.Struct, frozen=True):
    """Which environment a row came from, exactly enough to load the same one elsewhere."""

    id: str
    args: dict[str, Any] = {}
    api: str = "v0"
    fingerprint: str = ""
    """sha256 over id, args and the versions of verifiers and of the environment's package."""


class VersionSpan(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a sequence were sampled with this policy version."""

    version: int
    start: int
    end: int


class Distill(msgspec.Struct, frozen=True):
    """A teacher's view of one sequence, aligned to its tokens.

    Row t of `token_ids` and `logprobs` holds the teacher's k best for token t given tokens[:t], by
    rank. Position 0 has no prediction: its ids are -1 and its logprobs 0.
    """

    k: int
    token_ids: Packed
    """int32 [T, k]"""
    logprobs: Packed
    """float16 [T, k]"""
    own: Packed
    """float32 [T]: the teacher's logprob of token t itself; 0 at position 0."""


class Sequence(msgspec.Struct):
    """One token sequence of a sample; all arrays have the length of `tokens`."""

    tokens: Packed
    """int32 [T]: prompt and completion."""
    mask: Packed
    """uint8 [T]: 1 where the policy sampled the token."""
    logprobs: Packed | None = None
    """float32 [T]: the sampler's own logprob where mask is 1, 0 elsewhere."""
    versions: list[VersionSpan] = []
    distill: Distill | None = None
    extra: dict[str, Packed] = {}
    """Further arrays of the same length, passed through by name."""


class Usage(msgspec.Struct):
    """Tokens that a sample cost, over all its requests."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    requests: int = 0
    cost_usd: float | None = None


class Row(msgspec.Struct):
    """One item of an environment or dataset."""

    prompt: list[Message]
    """System message, few-shot turns and question, as the environment made them."""
    answer: str | None = None
    info: dict[str, Any] = {}
    task: str = ""
    example_id: int = 0
    columns: dict[str, Any] = {}
    """The row's further columns, which reward functions may ask for by name."""

    @property
    def question(self) -> str:
        """The last user message as text, for people and reports."""
        for message in reversed(self.prompt):
            if message.get("role") == "user":
                content = message.get("content")
                return content if isinstance(content, str) else str(content)
        return ""


class BlobRef(msgspec.Struct, frozen=True):
    """Where the bodies of a record lie that were too big for its topic (`shared/blobs.py`)."""

    uri: str
    sha256: str
    size_bytes: int


class Prompt(msgspec.Struct, tag="prompt", kw_only=True):
    """One sample to be generated."""

    v: int = SCHEMA_VERSION
    run: str
    pipeline: str
    n: int
    i: int
    k: int
    epoch: int = 0
    row_index: int = 0
    env: EnvRef
    row: Row
    seed: int = 0
    """Request seed: a hash of the run's seed and (n, i), the same on every attempt."""
    group_overrides: dict[str, Any] = {}
    issued_version: int = 0
    bodies: BlobRef | None = None
    """Row, left out."""
    failure: Failure | None = None
    """Why it can't be generated at all: its Rollout ends in this error."""


class Rollout(msgspec.Struct, tag="rollout", kw_only=True):
    """What became of one Prompt: always exactly one, failures included."""

    v: int = SCHEMA_VERSION
    run: str
    pipeline: str
    n: int
    i: int
    k: int
    epoch: int = 0
    row_index: int = 0
    env: EnvRef
    row: Row
    group_overrides: dict[str, Any] = {}
    prompt_offset: int = -1
    """Where its Prompt lies; a group's deadline waits until the generator committed past it."""
    completion: list[Message] = []
    sequences: list[Sequence] = []
    stop: Stop
    finish_reason: str = ""
    """The server's own word, e.g. `stop`, `length`, `abort`, `tool_calls`."""
    error: Failure | None = None
    state: dict[str, Any] = {}
    """What the environment's rubric needs beside the row (`shared/environments/wire.py`)."""
    usage: Usage = msgspec.field(default_factory=Usage)
    generation_params: dict[str, Any] = {}
    model: str = ""
    endpoint: str = ""
    attempts: int = 1
    duration_s: float = 0.0
    bodies: BlobRef | None = None
    """Row, completion, sequences and state, left out."""


class RewardPart(msgspec.Struct, frozen=True):
    """One reward function's value; a total is the sum of value x weight over all parts."""

    source: str
    value: float
    weight: float


class Sample(msgspec.Struct, kw_only=True):
    """A rollout as a member of its group, with what scorers and teachers added."""

    i: int
    completion: list[Message] = []
    sequences: list[Sequence] = []
    stop: Stop
    finish_reason: str = ""
    error: Failure | None = None
    state: dict[str, Any] = {}
    usage: Usage = msgspec.field(default_factory=Usage)
    generation_params: dict[str, Any] = {}
    duration_s: float = 0.0
    reward: float | None = None
    """None where nothing scored it: a failure is never a reward of 0."""
    advantage: float | None = None
    rewards: list[RewardPart] = []
    metrics: dict[str, float] = {}
    parsed_answer: str | None = None


class Group(msgspec.Struct, kw_only=True):
    """What Scored and Distilled have in common: all samples of one row in one epoch."""

    v: int = SCHEMA_VERSION
    run: str
    pipeline: str
    n: int
    k: int
    epoch: int = 0
    row_index: int = 0
    env: EnvRef
    row: Row
    group_overrides: dict[str, Any] = {}
    kind: Kind = Kind.SCORED
    reason: str = ""
    """Why it was dropped or parked; one of a small set of words, e.g. `zero_variance`."""
    detail: str = ""
    redrives: int = 0
    """How often the group was put back from the dead letters: a later try counts over a park."""
    samples: list[Sample] = []
    model: str = ""
    bodies: BlobRef | None = None
    """Row and samples, left out."""

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version of any token: the group's age is counted from it."""
        return min(
            (span.version for s in self.samples for q in s.sequences for span in q.versions),
            default=None,
        )


class Scored(Group, tag="scored", kw_only=True):
    """A group after a scoring stage."""


class Distilled(Group, tag="distilled", kw_only=True):
    """A group after the teacher."""

    teacher: str = ""
    top_k: int = 0
    distill_error: Failure | None = None
    """Set where a sibling failed or differed in length: the group goes on without payload."""


class Input(msgspec.Struct):
    """An input record as it was read, whole."""

    offset: int
    value: bytes | None
    """None where it was left in its topic: too big to keep a second time, or to hold in memory."""
    headers: list[tuple[str, bytes]] = []
    key: bytes | None = None
    timestamp_ms: int = 0


class DeadLetter(msgspec.Struct, tag="dead_letter", kw_only=True):
    """What could not be processed, with everything needed to look at it or to try again."""

    v: int = SCHEMA_VERSION
    run: str
    pipeline: str
    stage: str
    n: int = -1
    topic: str
    partition: int
    offset: int
    error: Failure
    inputs: list[Input] = []
    """The input records, untouched."""
    at_ms: int = 0
    attempts: int = 0
    redrives: int = 0
    """How often the group had been put back before this letter."""


class Issued(msgspec.Struct, tag="issued", kw_only=True):
    """Ledger: group n now exists."""

    v: int = SCHEMA_VERSION
    n: int
    k: int
    env: str = ""
    row_index: int = 0
    epoch: int = 0
    row_hash: str = ""
    restored: bool = False
    """Its end is in the sink's parts of an earlier log: it is not to be generated again."""


class Outcome(StrEnum):
    """How a group ended at a leaf, or was set aside."""

    DELIVERED = "delivered"
    DROPPED = "dropped"
    PARKED = "parked"


class Ended(msgspec.Struct, tag="ended", kw_only=True):
    """Ledger: how group n ended at one leaf. Only sinks write it."""

    v: int = SCHEMA_VERSION
    n: int
    leaf: str
    outcome: Outcome
    reason: str = ""
    reward_sum: float = 0.0
    reward_count: int = 0
    redrives: int = 0
    """Of a parked group: which try it was."""


class Redriven(msgspec.Struct, tag="redriven", kw_only=True):
    """Ledger: parked group n was put back in flight."""

    v: int = SCHEMA_VERSION
    n: int
    redrives: int = 1
    """How often by now; it counts over parks of earlier tries, whatever the order in the log."""
    leaves: list[str] = []
    """The leaves that the parking stage leads to; empty means all."""


G = TypeVar("G", Scored, Distilled)

Record = (
    Prompt | Rollout | Scored | Distilled | DeadLetter | Issued | Ended | Redriven
    | Answer | PolicyVersion | PolicyLive | Offered | Acked | Finished
)
"""Everything that a topic of a run can hold."""


def group_of(rollouts: list[Rollout]) -> Scored:
    """A group record with the rollouts as its samples, not scored yet."""
    first = next((rollout for rollout in rollouts if rollout.row.prompt), rollouts[0])
    return Scored(
        run=first.run, pipeline=first.pipeline, n=first.n, k=first.k, epoch=first.epoch,
        row_index=first.row_index, env=first.env, row=first.row,
        group_overrides=first.group_overrides,
        model=next((r.model for r in rollouts if r.model), ""),
        samples=[sample_of(rollout) for rollout in rollouts],
    )


def sample_of(rollout: Rollout) -> Sample:
    """A rollout as a member of its group."""
    return Sample(
        i=rollout.i, completion=rollout.completion, sequences=rollout.sequences, stop=rollout.stop,
        finish_reason=rollout.finish_reason, error=rollout.error, state=rollout.state,
        usage=rollout.usage, generation_params=rollout.generation_params,
        duration_s=rollout.duration_s,
    )


def passed_on(kind: type[G], group: Group) -> G:
    """The same group as the next stage's record."""
    shared = {name: getattr(group, name) for name in Group.__struct_fields__}
    return group if type(group) is kind else kind(**shared)
