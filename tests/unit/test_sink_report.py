"""The report's numbers on hand-made groups: a failed sample is counted and never a 0."""

from __future__ import annotations

from rollstream.services.sink.parts import FullLine
from rollstream.services.sink.report import Tallies, metrics_file, sample_lines
from rollstream.shared.arrays import pack
from rollstream.shared.records import (
    EnvRef,
    Failure,
    Outcome,
    Row,
    Sample,
    Scored,
    Sequence,
    Stop,
    VersionSpan,
)
from rollstream.shared.routes import builtin, stages
from rollstream.shared.runs import EnvironmentSource, RunConfig


def line(n: int, rewards: list[float | None], *, env: str = "sums", version: int = 3) -> FullLine:
    sequence = Sequence(
        tokens=pack([1, 2], "int32"), mask=pack([0, 1], "uint8"),
        versions=[VersionSpan(version, 1, 2)],
    )
    samples = [
        Sample(i=i, reward=r, stop=Stop.STOP if r is not None else Stop.TIMEOUT,
               sequences=[sequence], parsed_answer="4",
               error=None if r is not None else Failure("Timeout", "300 s"))
        for i, r in enumerate(rewards)
    ]
    dropped = all(r is None for r in rewards)
    return FullLine(
        n=n, outcome=Outcome.DROPPED if dropped else Outcome.DELIVERED,
        reason="incomplete" if dropped else "",
        group=Scored(
            run="e1", pipeline="eval", n=n, k=len(rewards), env=EnvRef(id=env), row_index=n,
            row=Row(prompt=[{"role": "user", "content": "2+2"}], answer="4"), samples=samples,
        ),
    )


def run() -> RunConfig:
    return RunConfig(
        run="e1", pipeline="eval", partitions=1, log_id="x", model="m", group_size=2,
        stages=stages(builtin(), "eval", teacher=False),
        environments=[EnvironmentSource(id="sums")],
    )


def test_averages_and_pass_rates_by_hand() -> None:
    tallies = Tallies()
    for one in (line(0, [1.0, 0.0]), line(1, [1.0, 1.0]), line(2, [0.0, None])):
        tallies.add(one)
    found = tallies.whole.metrics(2, 0.5)
    assert found["avg@2"] == 3 / 5
    assert found["eval/avg_total_score"] == 3 / 5
    assert found["pass@1"] == (0.5 + 1 + 0) / 3
    assert found["pass@2"] == 1.0  # the third row has one scored sample: it says nothing
    assert found["pass^2"] == 0.5
    assert (found["samples"], found["scored_samples"], found["errored_samples"]) == (6, 5, 1)
    assert found["errored_by_stop"] == {"timeout": 1}
    assert found["avg@2_stderr"] > 0


def test_a_dropped_group_is_counted_and_moves_no_mean() -> None:
    tallies = Tallies()
    tallies.add(line(0, [1.0, 1.0]))
    tallies.add(line(1, [None, None]))
    found = tallies.whole.metrics(2, 0.5)
    assert found["avg@2"] == 1.0
    assert found["dropped_groups"] == {"incomplete": 1}
    assert found["errored_samples"] == 2


def test_environments_and_versions_apart() -> None:
    tallies = Tallies()
    tallies.add(line(0, [1.0, 1.0], env="sums", version=1))
    tallies.add(line(1, [0.0, 0.0], env="tools", version=2))
    file = metrics_file(tallies, run(), now_s=1.0)
    assert file["results"]["atropos|sums|0"]["avg@2"] == 1.0
    assert file["results"]["atropos|tools|0"]["avg@2"] == 0.0
    assert file["results"]["all"]["avg@2"] == 0.5
    assert file["versions"]["1"]["avg@2"] == 1.0
    assert file["config_general"]["generation_parameters"]["max_new_tokens"] == 2048


def test_samples_carry_what_the_original_wrote() -> None:
    good, failed = sample_lines(line(0, [0.5, None]), 0.5)
    assert (good["question"], good["gold_answer"], good["model_parsed"]) == ("2+2", "4", "4")
    assert (good["score"], good["correct"]) == (0.5, True)
    assert (failed["score"], failed["correct"], failed["stop"]) == (None, None, "timeout")
