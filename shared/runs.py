"""A run: its configuration, its state, and the compacted topic that tells every service of both.

Keys of `<prefix>.runs`: `<run>/config`, written once when every stage has accepted, and
`<run>/state`, which carries the proposal first and then running, paused, stopped or done.
"""

from __future__ import annotations

import re
import secrets
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rollstream.shared.config import ConfigError
from rollstream.shared.routes import Route

RUN_ID = re.compile(r"[a-z0-9-]{1,63}")


class EnvironmentSource(msgspec.Struct, frozen=True):
    """Rows of one verifiers environment, or of a dataset file, with its share of the groups."""

    id: str = ""
    args: dict[str, Any] = {}
    weight: Annotated[float, Meta(gt=0)] = 1.0
    dataset: str = ""
    """A JSONL file with `messages`, `prompt` or `question` instead of an environment."""
    split: Literal["train", "eval"] = "train"
    fingerprint: str = ""
    """Of the environment's code and arguments: every stage loads exactly this."""
    dataset_fingerprint: str = ""
    rows: int = 0


class Sampling(msgspec.Struct, frozen=True):
    """What the sampler is told; the field names are OpenAI's and vLLM's."""

    temperature: Annotated[float, Meta(ge=0, description="softmax temperature")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="nucleus")] = 1.0
    top_k: Annotated[int, Meta(ge=-1, description="-1 = off")] = -1
    max_tokens: Annotated[int, Meta(ge=1, description="completion budget in tokens")] = 2048
    stop: Annotated[list[str], Meta(description="stop strings")] = []

    @property
    def is_plain(self) -> bool:
        """Whether the model's own distribution is sampled: then its logprobs are the sampler's."""
        return self.temperature == 1 and self.top_p == 1 and self.top_k in (-1, 0)


class Teacher(msgspec.Struct, frozen=True):
    """Whose top-k logprobs are attached to each group, if anybody's."""

    endpoint: Annotated[str, Meta(description="name of an [endpoints.NAME], or a URL")] = ""
    model: Annotated[str, Meta(description="the teacher's model name")] = ""
    top_k: Annotated[int, Meta(ge=-1, description="0 = own token only, -1 = skip")] = 1

    @property
    def on(self) -> bool:
        return bool(self.endpoint or self.model)


class Filters(msgspec.Struct, frozen=True):
    """Which scored groups are dropped, each with its reason in the ledger."""

    zero_variance: Annotated[
        Literal["auto", "on", "off"],
        Meta(description="drop groups with equal rewards; auto = on in rl without a teacher"),
    ] = "auto"
    max_sequence_tokens: Annotated[
        int, Meta(ge=0, description="rl: drop a group with a longer sequence; 0 = off")
    ] = 0
    min_completion_tokens: Annotated[int, Meta(ge=0, description="0 = off")] = 0


class SinkSettings(msgspec.Struct, frozen=True):
    """Where a run's results go."""

    out: Annotated[str, Meta(description="folder for files and reports")] = ""
    formats: Annotated[list[str], Meta(description="dataset files: jsonl, parquet")] = (
        msgspec.field(default_factory=lambda: ["jsonl", "parquet"])
    )
    min_score: (
        Annotated[float, Meta(description="sft: only samples with at least this reward")] | None
    ) = None
    pass_threshold: Annotated[float, Meta(description="eval: passes at this reward")] = 0.5
    host: Annotated[str, Meta(description="the trainer API listens here")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="the trainer API's port")] = 8000


class Deadlines(msgspec.Struct, frozen=True):
    """How long each wait may last, in seconds."""

    request_s: Annotated[float, Meta(gt=0)] = 300.0
    teacher_s: Annotated[float, Meta(gt=0)] = 1200.0
    sample_s: Annotated[float, Meta(gt=0)] = 1200.0
    group_s: Annotated[float, Meta(gt=0)] = 1800.0
    scoring_s: Annotated[float, Meta(gt=0)] = 60.0
    outage_s: Annotated[
        float, Meta(gt=0, description="the longest outage of a stage that must lose nothing")
    ] = 28_800.0

    @property
    def least_retention_ms(self) -> int:
        """How long a topic must keep records, so that they are read before they go."""
        return int(2000 * (max(self.sample_s, self.teacher_s, self.group_s) + self.outage_s))


class Updates(msgspec.Struct, frozen=True):
    """How new weights get to the inference servers, and what becomes of what is under way there."""

    method: Annotated[
        Literal["none", "trainer", "reload", "lora"],
        Meta(description="none: nobody asks; trainer: it moves them and names them; "
             "reload, lora: from files that it announces"),
    ] = "none"
    in_flight: Annotated[
        Literal["keep", "abort"], Meta(description="reload: what becomes of requests under way")
    ] = "keep"


class BlobSettings(msgspec.Struct, frozen=True):
    """Where what is too big for a topic goes; no secret: credentials are each process's own."""

    uri: Annotated[
        str, Meta(description="file:///folder, s3://bucket, gs://bucket/path; none: it is dropped")
    ] = ""
    above_bytes: Annotated[
        int, Meta(ge=1, le=4_000_000, description="records with more encoded bytes leave bodies")
    ] = 900_000


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the services need to know about a run; no secret ever."""

    v: int = 1
    run: str
    pipeline: str
    prefix: str = "rollstream"
    partitions: int
    log_id: str
    """Made when the run's topics were created: tells this log from an earlier one."""
    created_s: float = 0.0
    stages: list[Route]
    """The run's routing, resolved: what reads what, and which sinks count ends."""
    environments: list[EnvironmentSource]
    endpoint: str = "default"
    model: str
    sampling: Sampling = Sampling()
    group_size: int = 8
    group_policy: Literal["complete", "min_viable"] = "complete"
    min_viable: int = 1
    advantage: str = "mean"
    batch_size: int = 32
    total_steps: int | None = None
    total_groups: int | None = None
    """sft: delivered groups that end the run."""
    epochs: int | None = None
    max_staleness: int = 8
    max_in_flight: int = 256
    max_attempts: int = 3
    shuffle_seed: int | None = None
    exclude_done: str = ""
    """A run that is done: rows that it has delivered are left out, by content."""
    seed: int = 0
    filters: Filters = Filters()
    teacher: Teacher = Teacher()
    sink: SinkSettings = SinkSettings()
    deadlines: Deadlines = Deadlines()
    blobs: BlobSettings = BlobSettings()
    updates: Updates = Updates()
    include_messages: bool = False
    send_advantages: bool = False
    restored: list[tuple[int, int]] = []
    """Groups [first, last] whose end is in the sink's parts of an earlier log of this run."""
    settings: dict[str, Any] = {}
    """Sections for services that are not this project's own, by instance name."""

    @property
    def wants_tokens(self) -> bool:
        """Whether token ids and the sampler's logprobs are a must."""
        return self.pipeline == "rl"

    def stage(self, instance: str) -> Route:
        """The routing's row of one instance.

        Raises KeyError where the run has no such stage.
        """
        for route in self.stages:
            if route.instance == instance:
                return route
        raise KeyError(instance)


class Status(StrEnum):
    PROPOSED = "proposed"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    """Told to stop: open groups close as cancelled, then it is done."""
    FINISHING = "finishing"
    """Every group has ended: the sinks write their final files and say so on `control`."""
    DONE = "done"
    REFUSED = "refused"

    @property
    def live(self) -> bool:
        """Whether stages work on the run: a stopped one still drains."""
        return self in (Status.RUNNING, Status.PAUSED, Status.STOPPED, Status.FINISHING)


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stands; the newest on the topic counts."""

    v: int = 1
    status: Status
    reason: str = ""
    changed_s: float = 0.0
    proposal: RunConfig | None = None
    """Only while proposed: the configuration that stages are asked about."""


class Run(msgspec.Struct, kw_only=True):
    """A run as the runs topic tells it so far."""

    id: str
    config: RunConfig | None = None
    state: RunState | None = None

    @property
    def status(self) -> Status | None:
        return self.state.status if self.state else None


class Registry:
    """A pure fold of the runs topic: what runs there are and how each stands.

    Records may come twice and in any order of keys; the newest of a key counts.
    """

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}

    def apply(self, key: bytes | None, value: bytes | None) -> str | None:
        """Take one record in; the id of the run that it changed, None for a key that is no run's.

        Raises msgspec.MsgspecError for a value that is no run record.
        """
        run_id, _, what = (key or b"").decode(errors="replace").partition("/")
        if what not in ("config", "state") or not RUN_ID.fullmatch(run_id):
            return None
        run = self.runs.setdefault(run_id, Run(id=run_id))
        if what == "config":
            run.config = None if value is None else msgspec.json.decode(value, type=RunConfig)
        else:
            run.state = None if value is None else msgspec.json.decode(value, type=RunState)
        if run.config is None and run.state is None:
            del self.runs[run_id]
        return run_id


def config_key(run: str) -> bytes:
    return f"{run}/config".encode()


def state_key(run: str) -> bytes:
    return f"{run}/state".encode()


def new_log_id() -> str:
    """A short random name for one life of a run's topics."""
    return secrets.token_hex(4)


def check_run_id(run: str) -> str:
    """The id back.

    Raises ConfigError where it is not `[a-z0-9-]{1,63}`.
    """
    if not RUN_ID.fullmatch(run):
        raise ConfigError("--run", run, "use 1 to 63 of a-z, 0-9 and -")
    return run


class Refusal(Exception):
    """A stage can't serve this run; the message names the field, its value and the fix."""

    def __init__(self, field: str, value: object, fix: str) -> None:
        super().__init__(str(ConfigError(field, value, fix)))
