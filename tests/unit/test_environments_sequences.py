"""Turns to sequences: every sampled token is trained on exactly once, where it was sampled."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.shared.arrays import unpack
from rollstream.shared.environments.sequences import Turn, build, places
from rollstream.shared.records import VersionSpan

ids = st.lists(st.integers(0, 50_000), min_size=1, max_size=6)


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[list[Turn], int]:
    """Turns that mostly continue the one before, and how many of them started anew."""
    turns: list[Turn] = []
    so_far: list[int] = []
    anew = 0
    for number in range(draw(st.integers(1, 6))):
        rewritten = bool(turns) and draw(st.booleans())
        history = [*so_far[:-1], so_far[-1] + 1] if rewritten else so_far
        prompt = history + draw(ids)
        anew += rewritten or not turns
        sampled = draw(ids)
        logprobs = draw(
            st.lists(
                st.floats(-30, -0.125, width=32), min_size=len(sampled), max_size=len(sampled)
            )
        )
        turns.append(
            Turn(prompt, sampled, logprobs, [VersionSpan(number, 0, len(sampled))], "stop")
        )
        so_far = prompt + sampled
    return turns, anew


@given(rollouts())
def test_each_turn_is_found_where_it_was_sampled(drawn: tuple[list[Turn], int]) -> None:
    turns, anew = drawn
    sequences = build(turns)
    assert len(sequences) == anew
    for turn, place in zip(turns, places(turns), strict=True):
        sequence = sequences[place.sequence]
        assert sequence.logprobs is not None
        tokens, mask = unpack(sequence.tokens), unpack(sequence.mask)
        assert tokens[: place.start].tolist() == turn.prompt_ids
        assert tokens[place.start : place.end].tolist() == turn.token_ids
        assert mask[place.start : place.end].all()
        assert unpack(sequence.logprobs)[place.start : place.end].tolist() == turn.logprobs
        version = turn.versions[0].version
        assert VersionSpan(version, place.start, place.end) in sequence.versions


@given(rollouts())
def test_nothing_but_sampled_tokens_is_masked_in(drawn: tuple[list[Turn], int]) -> None:
    turns, _ = drawn
    sequences = build(turns)
    masked_in = sum(int(unpack(sequence.mask).sum()) for sequence in sequences)
    assert masked_in == sum(len(turn.token_ids or []) for turn in turns)
    for sequence in sequences:
        assert sequence.logprobs is not None
        assert len(sequence.tokens) == len(sequence.mask) == len(sequence.logprobs)
        outside = unpack(sequence.logprobs)[unpack(sequence.mask) == 0]
        assert np.array_equal(outside, np.zeros_like(outside))


def test_a_rolled_back_history_starts_a_sequence_of_its_own() -> None:
    turns = [Turn([1, 2], [3, 4], [-1.0, -2.0]), Turn([1, 2, 3], [9], [-3.0])]
    first, second = build(turns)
    assert unpack(first.tokens).tolist() == [1, 2, 3, 4]
    assert unpack(second.tokens).tolist() == [1, 2, 3, 9]
    assert unpack(second.mask).tolist() == [0, 0, 0, 1], "token 3 was trained on in the first"


def test_one_turn_without_ids_leaves_text_only() -> None:
    turns = [Turn([1], [2], [-1.0]), Turn(finish_reason="stop")]
    assert build(turns) == []
    assert places(turns) == []


def test_ids_without_logprobs_make_a_sequence_without_logprobs() -> None:
    [sequence] = build([Turn([1], [2])])
    assert sequence.logprobs is None
    assert unpack(sequence.mask).tolist() == [0, 1]


@pytest.mark.parametrize("logprobs", [[-1.0], [-1.0, float("nan")]])
def test_wrong_logprobs_are_refused(logprobs: list[float]) -> None:
    with pytest.raises(ValueError, match=r"logprobs for 2 sampled tokens|NaN"):
        build([Turn([1], [2, 3], logprobs)])
