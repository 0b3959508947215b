"""What a user says of a run, by flags, variables or file, and the RunConfig that it becomes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rollstream.shared import routes
from rollstream.shared.blobs import check_uri
from rollstream.shared.brokers.connection import Security
from rollstream.shared.config import ConfigError, resolve, section, settings_of
from rollstream.shared.inference.endpoints import normalise
from rollstream.shared.runs import (
    BlobSettings,
    Deadlines,
    EnvironmentSource,
    Filters,
    RunConfig,
    Sampling,
    SinkSettings,
    Teacher,
    Updates,
    check_run_id,
    new_log_id,
)
from rollstream.shared.settings import check_file, with_brokers

DEFAULT_PARTITIONS = 12
DEFAULT_SFT_GROUPS = 1000
"""An sft run on a paid server must not go on for ever because nobody said when to stop."""


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A run as the user asks for it; services learn it from the runs topic."""

    run: Annotated[str, Meta(description="the run's name [PIPELINE-date-time]")] = ""
    env: Annotated[str, Meta(description="verifiers environment, as for vf.load_environment")] = ""
    env_args: Annotated[dict[str, Any], Meta(description="its arguments, JSON")] = {}
    dataset: Annotated[str, Meta(description="instead: .jsonl or .parquet with messages, "
                                             "prompt or question")] = ""
    environments: Annotated[
        list[EnvironmentSource], Meta(description="several, JSON, each with id, args, weight")
    ] = []
    endpoint: Annotated[
        str, Meta(description="inference server: a name of the generator's [endpoints], or a URL")
    ] = "default"
    model: Annotated[str, Meta(description="model name as the server lists it")] = ""
    group_size: Annotated[int, Meta(ge=1, description="samples per row [8; eval 1]")] | None = None
    batch_size: Annotated[int, Meta(ge=1, description="rl: samples per batch")] = 32
    total_steps: (
        Annotated[int, Meta(ge=1, description="rl: batches that end the run [1000]")] | None
    ) = None
    total_groups: (
        Annotated[int, Meta(ge=1, description="delivered groups [sft 1000]; eval: rows")] | None
    ) = None
    epochs: Annotated[int, Meta(ge=1, description="sft, eval: passes over the rows")] | None = None
    max_staleness: Annotated[int, Meta(ge=0, description="rl: versions a group may be behind")] = 8
    max_in_flight: Annotated[int, Meta(ge=1, description="samples that are out at once")] = 256
    max_attempts: Annotated[int, Meta(ge=1, description="per sample and per scoring")] = 3
    group_policy: Annotated[
        Literal["complete", "min_viable"], Meta(description="what becomes of failed samples")
    ] = "complete"
    min_viable: Annotated[int, Meta(ge=1, description="rewarded samples that are enough")] = 1
    advantage: Annotated[str, Meta(description="mean, std, rloo, none, module:function")] = "mean"
    exclude_done: Annotated[
        str, Meta(description="leave out the rows that this earlier run has delivered, by content")
    ] = ""
    shuffle_seed: Annotated[int, Meta(description="shuffle rows; default: in order")] | None = None
    seed: Annotated[int, Meta(description="of all request seeds")] = 0
    include_messages: (
        Annotated[bool, Meta(description="messages for the trainer [rl no, sft yes]")] | None
    ) = None
    send_advantages: Annotated[bool, Meta(description="token-level advantages, too")] = False
    sampling: Sampling = Sampling()
    filters: Filters = Filters()
    teacher: Teacher = Teacher()
    sink: SinkSettings = SinkSettings()
    deadlines: Deadlines = Deadlines()
    blobs: BlobSettings = BlobSettings()
    updates: Updates = Updates()
    partitions: (
        Annotated[int, Meta(ge=1, le=1000, description="of each topic [12; embedded 4]")] | None
    ) = None
    brokers: Annotated[str, Meta(description="host:port,... [KAFKA_BOOTSTRAP_SERVERS, "
                                             "or the broker of `rollstream up`]")] = ""
    prefix: Annotated[str, Meta(description="all topics begin with it")] = "rollstream"
    startup_wait_s: Annotated[
        float, Meta(gt=0, description="how long the stages may take to accept")
    ] = 60.0
    security: Security = Security()


def load_run_settings(
    pipeline: str, table: Mapping[str, Any], flags: Mapping[str, Any],
    variables: Mapping[str, str],
) -> RunSettings:
    """The settings, with the pipeline's own defaults filled in.

    The file's `[run]` table holds them. Raises ConfigError.
    """
    check_file(table)
    own = section(table, "run")
    for key in ("brokers", "prefix", "security"):
        if key in table:
            own.setdefault(key, table[key])
    variables = with_brokers(variables)
    settings = resolve(RunSettings, table=own, variables=variables, flags=flags)

    def given(name: str) -> bool:
        setting = next(s for s in settings_of(RunSettings) if s.name == name)
        inner: Any = own
        for part in setting.path:
            inner = inner.get(part) if isinstance(inner, Mapping) else None
        return inner is not None or flags.get(name) is not None or setting.variable in variables

    size = settings.group_size or (1 if pipeline == "eval" else 8)
    sampling = settings.sampling
    if pipeline == "eval" and size == 1 and not given("sampling.temperature"):
        sampling = msgspec.structs.replace(sampling, temperature=0.0)
    steps = settings.total_steps
    if pipeline == "rl" and steps is None:
        steps = 1000
    groups = settings.total_groups
    if pipeline == "sft" and groups is None and settings.epochs is None:
        groups = DEFAULT_SFT_GROUPS
    return msgspec.structs.replace(
        settings, group_size=size, sampling=sampling, total_steps=steps, total_groups=groups,
        run=settings.run or f"{pipeline}-{time.strftime('%m%d-%H%M%S')}",
        include_messages=(
            pipeline != "rl" if settings.include_messages is None else settings.include_messages
        ),
    )


def to_config(pipeline: str, settings: RunSettings, table: list[routes.Route]) -> RunConfig:
    """The run's configuration as it is proposed.

    Raises ConfigError for what can be told without asking any service.
    """
    teacher = settings.teacher
    stages = routes.stages(table, pipeline, teacher=teacher.on)
    sources = list(settings.environments)
    if settings.env and settings.dataset:
        raise ConfigError("--dataset", settings.dataset, "give an environment or a dataset")
    if settings.env or settings.dataset:
        sources.insert(0, EnvironmentSource(
            id=settings.env, args=settings.env_args, dataset=settings.dataset,
        ))
    if not sources:
        raise ConfigError("--env", "(not given)", "give an environment id, or --dataset FILE")
    if settings.blobs.uri:
        check_uri(settings.blobs.uri)
    if not settings.model:
        raise ConfigError("--model", "(not given)", "give the model's name as the server lists it")
    for flag, endpoint in (
        ("--endpoint", settings.endpoint), ("--teacher.endpoint", teacher.endpoint)
    ):
        if "://" in endpoint:
            try:
                normalise(endpoint)
            except ValueError as error:
                raise ConfigError(flag, "?", str(error)) from error
    sources = [_absolute(source) for source in sources]
    if pipeline == "eval":
        sources = [msgspec.structs.replace(source, split="eval") for source in sources]
    group_size = settings.group_size or 1
    if pipeline == "rl":
        if settings.epochs is not None:
            raise ConfigError("--epochs", settings.epochs, "rl repeats its rows: use --total-steps")
        if settings.batch_size % group_size:
            raise ConfigError(
                "--batch-size", settings.batch_size,
                f"make it a multiple of the group size {group_size}: a group is never split",
            )
    if teacher != Teacher() and not (teacher.endpoint and teacher.model):
        missing = "endpoint" if not teacher.endpoint else "model"
        raise ConfigError(
            f"--teacher.{missing}", "(not given)", "a teacher needs its endpoint and its model"
        )
    if teacher.on and not any(stage.service == "teacher-distiller" for stage in stages):
        raise ConfigError("--teacher.model", teacher.model, f"{pipeline} has no teacher: leave it")
    run = check_run_id(settings.run)
    sink = settings.sink
    if not sink.out:
        sink = msgspec.structs.replace(sink, out=str(Path("runs") / run))
    sink = msgspec.structs.replace(sink, out=str(Path(sink.out).absolute()))
    shared = {
        name: getattr(settings, name)
        for name in RunConfig.__struct_fields__
        if name in RunSettings.__struct_fields__
        and name not in ("run", "sink", "environments", "partitions", "group_size")
    }
    return RunConfig(
        **shared, run=run, pipeline=pipeline, sink=sink, environments=sources, stages=stages,
        group_size=group_size, partitions=settings.partitions or DEFAULT_PARTITIONS,
        log_id=new_log_id(), created_s=time.time(),
    )


def local_blobs(given: BlobSettings, folder: Path) -> BlobSettings:
    """Where everything runs on this machine a folder of it will do, unless a store was given."""
    uri = given.uri or (folder / "blobs").absolute().as_uri()
    return msgspec.structs.replace(given, uri=uri)


def _absolute(source: EnvironmentSource) -> EnvironmentSource:
    """A dataset's file named so that the producer finds it from its own folder."""
    if source.id or not source.dataset:
        return source
    return msgspec.structs.replace(source, dataset=str(Path(source.dataset).absolute()))
