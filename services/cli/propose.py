"""Starting a run: topics, the proposal, the stages' answers, then the configuration for good.

A refusal by every member of a stage instance ends it: the topics are removed and the command exits
with 2 and the stage's own words.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import msgspec

from rollstream.shared.bus import Bus, Writer, start, stop
from rollstream.shared.codec import Undecodable, decode
from rollstream.shared.config import ConfigError
from rollstream.shared.control import Answer
from rollstream.shared.inference.vocabulary import TOKENIZER, difference
from rollstream.shared.log_reader import LogReader
from rollstream.shared.registry import read_registry
from rollstream.shared.runs import (
    Registry,
    Run,
    RunConfig,
    RunState,
    Status,
    config_key,
    state_key,
)
from rollstream.shared.topics import (
    check_retention,
    control_topic,
    create,
    delete,
    list_run_topics,
    run_specs,
    runs_spec,
    runs_topic,
)

SECOND_OPINION_S = 2.0
"""After a refusal, how long another member of the same stage instance may still accept."""

WITHDRAW_S = 1.0
"""How long services may take to see that a proposal is withdrawn (`attendance.FOLLOW_S`)."""

IDENTITY = ("pipeline", "group_size", "seed", "shuffle_seed", "model")
"""What must be the same for a run to go on with what its folder holds."""


class Refused(Exception):
    """Some stage can't serve the run."""


class Overtaken(Refused):
    """Another command started a run of this name; what there is of it is the other one's."""


async def propose(bus: Bus, config: RunConfig, wait_s: float) -> RunConfig:
    """Ask every stage and start the run; its final configuration.

    Raises Refused, and ConfigError where the name is taken or the folder is another run's.
    """
    writer = await bus.writer()
    admin = bus.admin()
    await start(admin)
    try:
        await create(admin, [runs_spec(config.prefix)])
        known = await _check_free(bus, config)
        # Topics that were there before, made by KafkaTopic or left by a removed run, are not ours.
        ours = known is not None or not await list_run_topics(admin, config.prefix, config.run)
        kinds = [route.output for route in config.stages if route.output]
        specs = run_specs(
            config.prefix, config.run, config.pipeline, [*kinds, "ledger", "dlq"],
            config.partitions, config.deadlines.least_retention_ms,
        )
        try:
            await create(admin, specs)
            await check_retention(admin, specs, config.deadlines.least_retention_ms)
            answers = await _ask(bus, writer, config, wait_s)
            final = _completed(config, answers)
            await _check_ours(bus, config)
        except Overtaken:
            raise
        except BaseException:
            await _tell(writer, config, state_key(config.run), None)
            if ours:
                # Whoever still looks at the proposal must know first: an answer to a topic that
                # is gone would make it again on some brokers.
                await asyncio.sleep(WITHDRAW_S)
                await delete(admin, config.prefix, config.run)
            raise
        await _tell(writer, config, config_key(config.run), final)
        running = RunState(status=Status.RUNNING, changed_s=time.time())
        await _tell(writer, config, state_key(config.run), running)
        remember(final)
        return final
    finally:
        await stop(admin)
        await writer.close()


async def _check_free(bus: Bus, config: RunConfig) -> Run | None:
    """What there is of a run of this name: at most a proposal that was never decided."""
    registry = await read_registry(bus, config.prefix)
    known = registry.runs.get(config.run)
    if known is not None and known.config is not None:
        raise ConfigError(
            "--run", config.run,
            f"it exists already and is {known.status}: choose another name, or remove it with "
            f"`rollstream runs rm {config.run}`",
        )
    return known


async def _check_ours(bus: Bus, config: RunConfig) -> None:
    """Nobody else has started a run of this name meanwhile. Raises Overtaken."""
    known = (await read_registry(bus, config.prefix)).runs.get(config.run)
    proposal = known.state.proposal if known is not None and known.state else None
    if proposal is None or proposal.log_id != config.log_id:
        raise Overtaken(
            f"--run = {config.run}: another command is starting a run of this name: choose another"
        )


async def known_runs(bus: Bus, prefix: str) -> Registry:
    """The same, or none where nobody has made the runs topic yet. Raises Lost."""
    admin = bus.admin()
    await start(admin)
    try:
        # All names: the embedded broker creates what it is asked for by name.
        there = runs_topic(prefix) in await admin.list_topics()
    finally:
        await stop(admin)
    return await read_registry(bus, prefix) if there else Registry()


async def find_run(bus: Bus, prefix: str, name: str) -> tuple[RunConfig, RunState | None]:
    """A run that was started, and its state. Raises ConfigError where there is none, Lost."""
    run = (await known_runs(bus, prefix)).runs.get(name)
    if run is None or run.config is None:
        raise ConfigError("RUN", name, "no such run; see `rollstream runs list`")
    return run.config, run.state


async def _ask(
    bus: Bus, writer: Writer, config: RunConfig, wait_s: float
) -> dict[str, Answer]:
    """The accepting answer of each stage instance. Raises Refused."""
    proposed = RunState(status=Status.PROPOSED, proposal=config, changed_s=time.time())
    await _tell(writer, config, state_key(config.run), proposed)
    wanted = [route.instance for route in config.stages]
    accepted: dict[str, Answer] = {}
    refused: dict[str, tuple[float, str]] = {}
    deadline_s = time.monotonic() + wait_s
    async with LogReader(bus, control_topic(config.prefix, config.run), [0]) as log:
        async for records in log.to_end(timeout_s=60):
            _sort(records, config, accepted, refused)
        while len(accepted) < len(wanted):
            now_s = time.monotonic()
            final = [
                reason for instance, (since_s, reason) in refused.items()
                if instance not in accepted and now_s - since_s > SECOND_OPINION_S
            ]
            if final:
                raise Refused("\n".join(final))
            if now_s > deadline_s:
                silent = [i for i in wanted if i not in accepted and i not in refused]
                raise Refused(
                    f"startup wait = {wait_s:g} s: no answer from {', '.join(silent)}; start "
                    f"{'it' if len(silent) == 1 else 'them'} (`rollstream up`, or `rollstream run`)"
                    ", or see in the log what is waited for"
                )
            _sort(await log.more(0.2), config, accepted, refused)
    return accepted


def _sort(
    records: list[Any], config: RunConfig, accepted: dict[str, Answer],
    refused: dict[str, tuple[float, str]],
) -> None:
    for record in records:
        try:
            said = decode(record.value, list(record.headers))
        except Undecodable:
            continue
        if not isinstance(said, Answer) or said.proposal != config.log_id:
            continue
        if said.accepted:
            accepted.setdefault(said.instance, said)
        else:
            refused.setdefault(said.instance, (time.monotonic(), f"{said.instance}: {said.reason}"))


def _completed(config: RunConfig, answers: dict[str, Answer]) -> RunConfig:
    """The configuration with what the stages found out: rows, fingerprints, what is done already.

    Raises Refused where two stages have different versions of an environment.
    """
    facts = {instance: answer.facts for instance, answer in answers.items()}
    producer = next(a.facts for a in answers.values() if "rows" in a.facts)
    for instance, found in facts.items():
        for env, fingerprint in found.get("fingerprints", {}).items():
            wanted = producer["fingerprints"].get(env, fingerprint)
            if fingerprint != wanted:
                raise Refused(
                    f"{instance}: env = {env}: its version or arguments differ: fingerprint "
                    f"{fingerprint[:12]} here, {wanted[:12]} at the producer; install the same"
                )
    check_tokenizers(config, facts)
    sources = [
        msgspec.structs.replace(
            source, rows=rows, dataset_fingerprint=dataset,
            fingerprint=producer["fingerprints"].get(source.id, ""),
        )
        for source, rows, dataset in zip(
            config.environments, producer["rows"], producer["dataset_fingerprints"], strict=True
        )
    ]
    restored = [found["restored"] for found in facts.values() if "restored" in found]
    final = msgspec.structs.replace(
        config, environments=sources, restored=restored[0] if len(restored) == 1 else []
    )
    if final.restored:
        check_same(final)
    return final


def check_tokenizers(config: RunConfig, facts: dict[str, dict[str, Any]]) -> None:
    """A teacher's ids must mean what the policy's mean. Raises Refused."""
    told = {i: found[TOKENIZER] for i, found in facts.items() if TOKENIZER in found}
    policy = next((i for i in told if config.stage(i).service == "generator"), None)
    for instance, fingerprint in told.items():
        if policy and (why := difference(told[policy], fingerprint)):
            raise Refused(
                f"{instance}: teacher.model = {config.teacher.model}: its vocabulary is not that "
                f"of {config.model} ({why}): use a teacher of the same tokenizer"
            )


def remember(config: RunConfig) -> None:
    """Keep the configuration beside the results, for people and for a resume."""
    path = Path(config.sink.out) / "run.json"
    # The folder is the sink's; on another machine than this one it may be none of ours.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))


def check_same(config: RunConfig) -> None:
    """A folder's earlier results are this run's own.

    Raises Refused where group n was another row, or sampled otherwise.
    """
    path = Path(config.sink.out) / "run.json"
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError):
        return
    now = msgspec.to_builtins(config)
    for field in IDENTITY:
        if before.get(field) != now[field]:
            raise Refused(
                f"{field} = {now[field]}: {config.sink.out} holds results of a run with "
                f"{before.get(field)}; choose another --sink.out"
            )
    for old, new in zip(before.get("environments", []), now["environments"], strict=False):
        if old.get("dataset_fingerprint") != new["dataset_fingerprint"]:
            raise Refused(
                f"dataset fingerprint = {new['dataset_fingerprint'][:12]}: {config.sink.out} holds "
                f"results for {old.get('dataset_fingerprint', '')[:12]}; choose another --sink.out"
            )


async def _tell(writer: Writer, config: RunConfig, key: bytes, value: Any) -> None:
    body = None if value is None else msgspec.json.encode(value)
    await writer.send_bytes(runs_topic(config.prefix), 0, key, body)
