"""Groups as a trainer reads them: all fields, aligned, strict JSON."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from rollstream.services.sink.trajectories import is_trainable, scored_data_group
from rollstream.shared.arrays import pack
from rollstream.shared.records import Distill, EnvRef, Row, Sample, Scored, Sequence, Stop

FIELDS = {
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params",
    "inference_logprobs", "overrides", "group_overrides", "images", "env_id",
    "distill_token_ids", "distill_logprobs",
}


def sequence(length: int = 4, *, k: int | None = None, extra: bool = False) -> Sequence:
    tokens = np.arange(10, 10 + length)
    mask = np.arange(length) >= 2
    distill = None if k is None else Distill(
        k=k, token_ids=pack(np.full((length, k), 7), "int32"),
        logprobs=pack(np.full((length, k), -0.5), "float16"),
        own=pack(np.full(length, -0.25), "float32"),
    )
    return Sequence(
        tokens=pack(tokens, "int32"), mask=pack(mask, "uint8"),
        logprobs=pack(np.where(mask, -1.0, 0.0), "float32"), distill=distill,
        extra={"ref_logprobs": pack(np.full(length, -2.0), "float32")} if extra else {},
    )


def group(*samples: Sample, **fields) -> Scored:
    return Scored(
        run="r", pipeline="rl", n=0, k=len(samples), env=EnvRef(id="sums"),
        row=Row(prompt=[{"role": "user", "content": "2+2"}]), samples=list(samples), **fields,
    )


def sample(i: int, reward: float | None, *sequences: Sequence, **fields) -> Sample:
    return Sample(
        i=i, stop=Stop.STOP, reward=reward, sequences=list(sequences),
        completion=[{"role": "assistant", "content": "4"}], **fields,
    )


def test_every_field_is_there_and_arrays_lie_on_top_of_each_other() -> None:
    made = scored_data_group(group(sample(0, 1.0, sequence()), sample(1, 0.0, sequence(5))))
    assert set(made) == FIELDS
    assert made["tokens"] == [[10, 11, 12, 13], [10, 11, 12, 13, 14]]
    assert made["masks"] == [[-100, -100, 12, 13], [-100, -100, 12, 13, 14]]
    assert made["inference_logprobs"][0] == [1.0, 1.0, -1.0, -1.0]
    assert made["scores"] == [1.0, 0.0]
    for name in ("advantages", "messages", "overrides", "group_overrides", "distill_token_ids"):
        assert made[name] is None


def test_each_sequence_of_a_sample_is_a_trajectory_with_its_score() -> None:
    made = scored_data_group(group(sample(0, 0.5, sequence(), sequence(6)), sample(1, 1.0)))
    assert [len(tokens) for tokens in made["tokens"]] == [4, 6]
    assert made["scores"] == [0.5, 0.5]


def test_a_failed_sibling_is_left_out_and_not_a_zero() -> None:
    made = scored_data_group(group(sample(0, 1.0, sequence()), sample(1, None, sequence())))
    assert made["scores"] == [1.0]


def test_advantages_and_messages_only_where_asked_for() -> None:
    made = scored_data_group(
        group(sample(0, 1.0, sequence(), advantage=0.25)), send_advantages=True,
        include_messages=True, env_id=3,
    )
    assert made["advantages"] == [[0.0, 0.0, 0.25, 0.25]]
    assert made["messages"] == [[{"role": "user", "content": "2+2"},
                                 {"role": "assistant", "content": "4"}]]
    assert made["env_id"] == 3


@pytest.mark.parametrize(("k", "ids", "logprobs"), [
    (2, [[], [7, 7], [7, 7], [7, 7]], [[], [-0.5] * 2, [-0.5] * 2, [-0.5] * 2]),
    (0, [[], [11], [12], [13]], [[], [-0.25], [-0.25], [-0.25]]),
])
def test_a_teachers_ranks_with_an_empty_first_position(k: int, ids: list, logprobs: list) -> None:
    made = scored_data_group(group(sample(0, 1.0, sequence(k=k))))
    assert made["distill_token_ids"] == [ids]
    assert made["distill_logprobs"] == [logprobs]


def test_a_payload_that_one_sibling_lacks_is_nobodys() -> None:
    made = scored_data_group(
        group(sample(0, 1.0, sequence(k=1, extra=True)), sample(1, 1.0, sequence()))
    )
    assert made["distill_logprobs"] is None
    assert made["ref_logprobs"] is None
    alone = scored_data_group(group(sample(0, 1.0, sequence(extra=True))))
    assert alone["ref_logprobs"] == [[-2.0] * 4]


def test_text_only_groups_have_null_tokens_and_a_score_per_sample() -> None:
    text = group(sample(0, 1.0), sample(1, 0.0))
    made = scored_data_group(text, include_messages=True)
    assert made["tokens"] is None
    assert made["scores"] == [1.0, 0.0]
    assert len(made["messages"]) == 2
    assert not is_trainable(text)


def test_the_result_is_strict_json() -> None:
    made = scored_data_group(group(sample(0, 1.0, sequence(k=2)), group_overrides={"a": 1}))
    text = msgspec.json.encode(made).decode()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
