"""An evaluation's report, made from its parts: `metrics.json`, `samples.jsonl`, and its settings.

File names and the outer shape are Atropos'; a sample that failed is counted and left out of every
mean, it is never a 0.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rollstream.services.sink.parts import FullLine, PartFile, in_order
from rollstream.services.sink.passk import (
    Estimate,
    ks,
    mean_over_rows,
    mean_over_samples,
    pass_at_k,
    pass_hat_k,
)
from rollstream.shared.durable import replacing
from rollstream.shared.records import Group, Outcome, Sample
from rollstream.shared.runs import RunConfig

ENDED = frozenset({Outcome.DELIVERED, Outcome.DROPPED})


@dataclass
class Tally:
    """What a set of groups adds up to: rewards by row, and what gave none."""

    rows: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    samples: int = 0
    errored: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, group: Group, sample: Sample) -> None:
        self.samples += 1
        if sample.reward is None:
            self.errored[sample.stop.value if not sample.stop.scored else "unscored"] += 1
        else:
            self.rows[group.env.id, group.row_index].append(sample.reward)

    def metrics(self, k: int, pass_threshold: float) -> dict[str, Any]:
        """Averages, pass@k and pass^k with standard errors, and the counts they rest on."""
        rewards = [values for values in self.rows.values() if values]
        passed = [sum(r >= pass_threshold for r in values) for values in rewards]
        average = mean_over_samples(rewards)
        found: dict[str, Any] = {
            "eval/avg_total_score": average.mean if average else None,
            **_named(f"avg@{k}", average),
        }
        for size in ks(k):
            enough = [(len(r), c) for r, c in zip(rewards, passed, strict=True) if len(r) >= size]
            found |= _named(
                f"pass@{size}", mean_over_rows([pass_at_k(n, c, size) for n, c in enough])
            )
            found |= _named(
                f"pass^{size}", mean_over_rows([pass_hat_k(n, c, size) for n, c in enough])
            )
        return found | {
            "pass_threshold": pass_threshold,
            "rows": len(rewards),
            "samples": self.samples,
            "scored_samples": sum(map(len, rewards)),
            "errored_samples": sum(self.errored.values()),
            "errored_by_stop": dict(sorted(self.errored.items())),
            "dropped_groups": dict(sorted(self.dropped.items())),
        }


def _named(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    return {
        name: estimate.mean if estimate else None,
        f"{name}_stderr": estimate.standard_error if estimate else None,
    }


@dataclass
class Tallies:
    """The whole, and each environment and policy version apart."""

    whole: Tally = field(default_factory=Tally)
    by_env: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    by_version: dict[int, Tally] = field(default_factory=lambda: defaultdict(Tally))

    def add(self, line: FullLine) -> None:
        if line.group is None:
            self.whole.dropped[line.reason] += 1
            return
        group = line.group
        if line.outcome is Outcome.DROPPED:
            self.whole.dropped[line.reason] += 1
            self.by_env[group.env.id].dropped[line.reason] += 1
        for sample in group.samples:
            self.whole.add(group, sample)
            self.by_env[group.env.id].add(group, sample)
            if (version := sample_version(sample)) is not None:
                self.by_version[version].add(group, sample)


def sample_version(sample: Sample) -> int | None:
    """The oldest policy version of any of the sample's tokens."""
    return min((v.version for q in sample.sequences for v in q.versions), default=None)


def write_report(parts: list[PartFile], out: Path, run: RunConfig) -> None:
    """Make the report in `out` anew from all parts. Raises PartError where one is damaged."""
    tallies = Tallies()
    with replacing(out / "samples.jsonl") as path, path.open("wb") as file:
        for line in in_order(parts, ENDED):
            tallies.add(line)
            for sample in sample_lines(line, run.sink.pass_threshold):
                file.write(msgspec.json.encode(sample) + b"\n")
    for name, content in {
        "metrics.json": metrics_file(tallies, run, time.time()),
        "evaluate_config.yaml": config_file(run),
    }.items():
        with replacing(out / name) as path:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def metrics_file(tallies: Tallies, run: RunConfig, now_s: float) -> dict[str, Any]:
    """`metrics.json` in Atropos' shape, and what each policy version reached."""
    k, threshold = run.group_size, run.sink.pass_threshold
    return {
        "config_general": {
            "model_name": run.model,
            "total_evaluation_time_seconds": str(round(max(0.0, now_s - run.created_s), 3)),
            "generation_parameters": {
                "max_new_tokens": run.sampling.max_tokens,
                **{name: value for name, value in msgspec.to_builtins(run.sampling).items()
                   if name != "max_tokens"},
                "n": k, "seed": run.seed,
            },
        },
        "results": {
            **{f"atropos|{env}|0": tally.metrics(k, threshold)
               for env, tally in sorted(tallies.by_env.items())},
            "all": tallies.whole.metrics(k, threshold),
        },
        "versions": {str(version): tally.metrics(k, threshold)
                     for version, tally in sorted(tallies.by_version.items())},
    }


def config_file(run: RunConfig) -> dict[str, Any]:
    """`evaluate_config.yaml` with Atropos' keys. JSON, which any YAML reader reads as well."""
    settings: Iterable[str] = (
        "run", "environments", "sampling", "group_size", "epochs", "seed", "sink", "deadlines",
    )
    plain = msgspec.to_builtins(run)
    return {
        "env": {name: plain[name] for name in settings},
        "openai": [{"model_name": run.model, "base_url": run.endpoint}],
        "slurm": False,
        "testing": False,
    }


def sample_lines(line: FullLine, pass_threshold: float) -> Iterator[dict[str, Any]]:
    """A group's samples as `samples.jsonl` has them; `score` and `correct` null where it failed."""
    if line.group is None:
        return
    group = line.group
    for sample in group.samples:
        yield {
            "messages": [*group.row.prompt, *sample.completion],
            "question": group.row.question,
            "gold_answer": group.row.answer,
            "model_parsed": sample.parsed_answer,
            "score": sample.reward,
            "correct": None if sample.reward is None else sample.reward >= pass_threshold,
            "finish_reason": sample.finish_reason,
            "stop": sample.stop.value,
            "error": sample.error,
            "env": group.env.id,
            "n": group.n, "i": sample.i, "row_index": group.row_index, "epoch": group.epoch,
            "policy_version": sample_version(sample),
            "rewards": sample.rewards, "metrics": sample.metrics,
            "dropped": line.reason or None,
        }
