"""The teacher's step: alignment, overrides, and a group that goes on without payload."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from making import run

from rollstream.services.teacher_distiller.distill import Distil, payload, top_k
from rollstream.shared.arrays import pack, unpack
from rollstream.shared.inference.types import InferenceError, PromptLogprobs
from rollstream.shared.records import EnvRef, Kind, Row, Sample, Scored, Sequence, Stop
from rollstream.shared.runs import Teacher
from rollstream.shared.step import PausesRun

RUN = run(teacher=Teacher(endpoint="t", model="big", top_k=2))


class FakeTeacher:
    """Knows that token t + 1 follows token t; fails on a token that it is told to."""

    def __init__(self, fails_on: int = -1, error: Exception | None = None) -> None:
        self.fails_on, self.error = fails_on, error
        self.asked: list[tuple[list[int], int]] = []

    async def prompt_logprobs(self, ids: list[int], k: int, **_: Any) -> PromptLogprobs:
        self.asked.append((ids, k))
        if self.fails_on in ids:
            raise self.error or InferenceError("teacher is down", status=500)
        rows = [[ids[t - 1] + 1 + r for r in range(k)] for t in range(1, len(ids))]
        return PromptLogprobs(
            top_ids=[[], *rows], top_logprobs=[[], *([-0.1 - r for r in range(k)] for _ in rows)],
            own=[None, *(-0.5 for _ in rows)],
        )

    async def text_offsets(self, ids: list[int], *_: Any, **__: Any) -> list[int] | None:
        return [10 * t for t in range(len(ids))] if len(ids) > 2 else None


def group(*sequences: list[int], **overrides: Any) -> Scored:
    return Scored(
        run="r", pipeline="rl", n=0, k=len(sequences), env=EnvRef("e"), row=Row(prompt=[]),
        group_overrides=overrides,
        samples=[
            Sample(i=i, stop=Stop.STOP, reward=1.0, sequences=[
                Sequence(tokens=pack(ids, "int32"), mask=pack([1] * len(ids), "uint8"))
            ] if ids else [])
            for i, ids in enumerate(sequences)
        ],
    )


async def distil(given: Scored, teacher: FakeTeacher):
    return await Distil(RUN, teacher)(given)  # type: ignore[arg-type]


async def test_row_t_speaks_of_token_t_given_the_ones_before():
    out = await distil(group([10, 11, 12], [20, 21]), FakeTeacher())
    first = out.samples[0].sequences[0].distill
    assert first is not None
    assert unpack(first.token_ids).tolist() == [[-1, -1], [11, 12], [12, 13]]
    assert np.abs(unpack(first.logprobs)[1:] - [[-0.1, -1.1]] * 2).max() < 1e-3
    assert unpack(first.own).tolist() == [0.0, -0.5, -0.5]
    extras = [sample.sequences[0].extra for sample in out.samples]
    assert unpack(extras[0]["text_offsets"]).tolist() == [0, 10, 20]
    assert extras[1] == {}, "a teacher that can't tell says nothing"
    assert (out.teacher, out.top_k, out.distill_error, out.kind) == ("big", 2, None, Kind.SCORED)


async def test_one_failure_takes_the_payload_of_the_whole_group_and_not_the_group():
    out = await distil(group([10, 11], [20, 21]), FakeTeacher(fails_on=20))
    assert out.distill_error is not None
    assert out.distill_error.message == "teacher is down"
    assert [s.sequences[0].distill for s in out.samples] == [None, None]
    assert [s.reward for s in out.samples] == [1.0, 1.0]


async def test_a_refused_key_pauses_the_run_instead():
    error = InferenceError("bad key", status=401)
    with pytest.raises(PausesRun, match="bad key"):
        await distil(group([10]), FakeTeacher(fails_on=10, error=error))


async def test_a_stopped_run_asks_its_teacher_for_nothing():
    teacher = FakeTeacher()
    out = await Distil(RUN, teacher, stopped=lambda: True)(group([10, 11]))  # type: ignore[arg-type]
    assert teacher.asked == []
    assert out.distill_error is not None
    assert out.distill_error.type == "cancelled"


@pytest.mark.parametrize(("overrides", "k"), [
    ({}, 2), ({"teacher_top_k": 7}, 7), ({"teacher_top_k": 0}, 0), ({"teacher_top_k": -5}, -1),
    ({"skip_teacher_top_k": True, "teacher_top_k": 7}, -1),
])
async def test_a_group_may_ask_for_another_k(overrides, k):
    given = group([10, 11], **overrides)
    assert top_k(given, RUN) == k
    teacher = FakeTeacher()
    out = await distil(given, teacher)
    assert teacher.asked == ([] if k < 0 else [([10, 11], k)])
    distill = out.samples[0].sequences[0].distill
    assert (distill is None) == (k < 0)
    if distill is not None:
        assert distill.token_ids.shape == [2, k]


async def test_a_group_without_tokens_goes_on_without_payload():
    out = await distil(group([], []), FakeTeacher())
    assert out.distill_error is None
    assert out.kind is Kind.SCORED


def test_a_teacher_that_speaks_of_other_tokens_is_refused():
    seen = PromptLogprobs(top_ids=[[], [1]], top_logprobs=[[], [-1.0]], own=[None, -1.0])
    assert payload([5, 6], seen, 1).k == 1
    with pytest.raises(ValueError, match="speaks of 2 tokens, the sequence has 3"):
        payload([5, 6, 7], seen, 1)
    with pytest.raises(ValueError, match="gave 1 candidates at 1, not 2"):
        payload([5, 6], seen, 2)
