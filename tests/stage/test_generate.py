"""The generator's step: what the server is told, and what becomes of its answers and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from making import run

from rollstream.services.generator.generate import Generate, sampling_arguments, stamp
from rollstream.shared.arrays import pack, unpack
from rollstream.shared.inference.types import Completion, ContextOverflow, InferenceError
from rollstream.shared.records import EnvRef, Prompt, Row, Sequence, Stop, Usage, VersionSpan
from rollstream.shared.runs import Sampling
from rollstream.shared.step import Blocked, PausesRun

PROMPT = Prompt(
    run="r", pipeline="rl", n=5, i=1, k=2, env=EnvRef(""), seed=77, issued_version=3,
    row=Row(prompt=[{"role": "user", "content": "2 + 2?"}], answer="4"),
    group_overrides={"teacher_top_k": 2},
)


class FakeClient:
    """Answers every chat the same way, or raises."""

    def __init__(self, error: InferenceError | None = None, finish: str = "stop") -> None:
        self.error, self.finish = error, finish
        self.asked: list[dict[str, Any]] = []

    async def chat(self, messages: list[Any], **asked: Any) -> Completion:
        self.asked.append({"messages": messages, **asked})
        if self.error:
            raise self.error
        return Completion(
            text="4", message={"role": "assistant", "content": "4"}, finish_reason=self.finish,
            prompt_ids=[1, 2, 3], token_ids=[4, 5], logprobs=[-0.5, -0.25],
            usage=Usage(prompt_tokens=3, completion_tokens=2, requests=1), endpoint="http://a",
        )


def step(client: FakeClient, **fields: Any) -> Generate:
    return Generate(run(**fields), client, {}, want_tokens=True)  # type: ignore[arg-type]


async def test_a_rollout_holds_the_samplers_own_tokens_and_the_prompts_identity():
    client = FakeClient()
    rollout = await step(client)(PROMPT)
    assert (rollout.n, rollout.i, rollout.k) == (5, 1, 2)
    assert rollout.group_overrides == {"teacher_top_k": 2}
    (sequence,) = rollout.sequences
    assert unpack(sequence.tokens).tolist() == [1, 2, 3, 4, 5]
    assert unpack(sequence.mask).tolist() == [0, 0, 0, 1, 1]
    assert sequence.logprobs is not None
    assert unpack(sequence.logprobs).tolist() == [0, 0, 0, -0.5, -0.25]
    assert sequence.versions == [VersionSpan(3, 0, 5)]
    (asked,) = client.asked
    assert (asked["seed"], asked["sticky"], asked["want_tokens"]) == (77, "r/5", True)
    await step(client)(PROMPT)
    assert client.asked[1]["seed"] == 77, "the same on every attempt"


@pytest.mark.parametrize(("finish", "stop"), [
    ("stop", Stop.STOP), ("length", Stop.LENGTH), ("tool_calls", Stop.TOOL),
    ("abort", Stop.CANCELLED), ("content_filter", Stop.REFUSED),
])
async def test_the_servers_word_becomes_one_of_ours(finish, stop):
    rollout = await step(FakeClient(finish=finish))(PROMPT)
    assert (rollout.stop, rollout.finish_reason) == (stop, finish)


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_what_every_sample_would_get_pauses_the_run(status):
    error = InferenceError("no such key", status=status)
    with pytest.raises(PausesRun, match="endpoint default: no such key"):
        await step(FakeClient(error))(PROMPT)


async def test_five_bad_requests_in_a_row_pause_the_run():
    client = FakeClient()
    generate = step(client)
    bad = InferenceError("no such field", status=422)
    for error in (bad, bad, bad, bad, None, bad, bad, bad, bad):
        client.error = error
        rollout = await generate(PROMPT)
        assert (rollout.stop is Stop.ERROR) == (error is not None)
    with pytest.raises(PausesRun, match=r"no such field \(5 requests in a row\)"):
        await generate(PROMPT)


async def test_prompts_that_are_too_long_pause_nothing():
    generate = step(FakeClient(ContextOverflow("too long", status=400)))
    for _ in range(20):
        rollout = await generate(PROMPT)
        assert (rollout.stop, rollout.error, rollout.sequences) == (Stop.TOO_LONG, None, [])


async def test_any_other_fault_is_an_error_of_this_sample_and_no_reward():
    rollout = await step(FakeClient(InferenceError("boom", status=500)))(PROMPT)
    assert rollout.stop is Stop.ERROR
    assert rollout.error is not None
    assert (rollout.error.type, rollout.error.message) == ("InferenceError", "boom")


async def test_a_prompt_of_another_environment_version_blocks():
    foreign = Prompt(run="r", pipeline="rl", n=0, i=0, k=1, env=EnvRef("e", {}, "v0", "abc"),
                     row=PROMPT.row)
    with pytest.raises(Blocked, match="fingerprint abc"):
        await step(FakeClient())(foreign)


def test_what_is_off_is_not_sent():
    assert sampling_arguments(run()) == {"temperature": 1.0, "max_tokens": 2048}
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=5, max_tokens=9, stop=["x"])
    assert sampling_arguments(run(sampling=sampling)) == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "max_tokens": 9, "stop": ["x"],
    }


async def test_greedy_decoding_asks_without_a_seed():
    client = FakeClient()
    await step(client, sampling=Sampling(temperature=0.0))(PROMPT)
    assert client.asked[0]["seed"] is None


def test_a_server_that_numbers_its_weights_is_believed():
    def sequence(*versions: VersionSpan) -> Sequence:
        return Sequence(tokens=pack([1, 2], "int32"), mask=pack([0, 1], "uint8"),
                        versions=list(versions))

    told, silent, unnumbered = (
        sequence(VersionSpan(9, 0, 2)), sequence(), sequence(VersionSpan(0, 0, 2)),
    )
    stamp([told, silent, unnumbered], 4)
    assert told.versions == [VersionSpan(9, 0, 2)]
    assert silent.versions == unnumbered.versions == [VersionSpan(4, 0, 2)]
