"""One rollout through the environment's own loop: tokens, endings, errors, state on the wire."""

import asyncio
import importlib
import sys
from collections import OrderedDict
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollstream.shared.arrays import unpack
from rollstream.shared.environments.client import ChatCall, RolloutClient
from rollstream.shared.environments.exact import survives
from rollstream.shared.environments.messages import from_openai
from rollstream.shared.environments.v0 import Environment, load
from rollstream.shared.environments.wire import dump_state, load_state
from rollstream.shared.inference.refusals import RefusesAll
from rollstream.shared.inference.types import (
    Completion,
    ContextOverflow,
    InferenceError,
    ServerUnavailable,
)
from rollstream.shared.records import Message, Sample, Stop, Usage

LOOP = """
import verifiers as vf
from datasets import Dataset

class Loop(vf.MultiTurnEnv):
    mode = ""

    async def setup_state(self, state):
        if self.mode == "broken":
            raise RuntimeError("the game is broken")
        if self.mode == "keeps":
            state["board"] = {"a": [1, 2.5, None, True]}
            state["pair"], state["by_int"], state["lock"] = (1, 2), {1: "x"}, object()
            state["nan"] = float("nan")
            state["info"]["secret"] = "7"
        return state

    async def env_response(self, messages, state, **kwargs):
        if self.mode == "asks":  # a side call: its tokens are nobody's to train on
            await self.get_model_response(state, [vf.UserMessage(content="side question")])
        if self.mode == "ends":
            state["final_env_response"] = [vf.UserMessage(content="you won")]
            return state["final_env_response"]
        return [vf.UserMessage(content=f"go on {len(state['trajectory'])}")]

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages[-1:] if self.mode == "forgets" else messages

def load_environment(mode="", max_turns=3, **kwargs):
    env = Loop(
        dataset=Dataset.from_list([{"question": "begin here", "answer": "7", "info": '{"k": 1}'}]),
        max_turns=max_turns, rubric=vf.Rubric(funcs=[lambda: 1.0]), **kwargs,
    )
    env.mode = mode
    return env
"""


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop_env.py").write_text(LOOP)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    sys.modules.pop("loop_env", None)


class Model:
    """Answers from a script, one byte a token; a later turn continues the tokens of the prior."""

    def __init__(self, *script: str | Message | Exception, finish: str = "stop") -> None:
        self.script = list(script)
        self.finish = finish
        self.seen: list[tuple[list[Message], Completion | None]] = []
        self.tools: list[dict[str, Any]] | None = None
        self.sampling: dict[str, Any] = {}

    async def __call__(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None,
        sampling: dict[str, Any],
        prior: Completion | None,
    ) -> Completion:
        self.seen.append((messages, prior))
        self.tools, self.sampling = tools, sampling
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        message: Message = answer if isinstance(answer, dict) else {
            "role": "assistant", "content": answer,
        }
        sampled = list(str(message["content"]).encode())
        history = [] if prior is None else (prior.prompt_ids or []) + (prior.token_ids or [])
        prompt = history + list(str(messages[-1]["content"]).encode())
        return Completion(
            text=message["content"] or "",
            message=message,
            finish_reason="tool_calls" if message.get("tool_calls") else self.finish,
            prompt_ids=prompt,
            token_ids=sampled,
            logprobs=[-0.5] * len(sampled),
            usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(sampled), requests=1),
        )


def tool_call(name: str, arguments: str) -> Message:
    function = {"name": name, "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


async def run(env: Environment, chat: ChatCall, **sampling: Any) -> Any:
    return await env.rollout(env.rows("train")[0], chat, "m", sampling)


async def test_a_tool_rollout_is_token_exact() -> None:
    env = load("tool_addition", {"num_train": 1, "num_eval": 1})
    model = Model(tool_call("add", '{"a": 1, "b": 2}'), tool_call("add", "{"), "It is 6")
    done = await run(env, model, temperature=1.0)

    assert [message["role"] for message in done.completion] == [
        "assistant", "tool", "assistant", "tool", "assistant",
    ]
    assert done.completion[0] == tool_call("add", '{"a": 1, "b": 2}')
    assert done.completion[1] == {"role": "tool", "content": "3", "tool_call_id": "c1"}
    assert (done.stop, done.finish_reason, done.error, done.lossy) == (Stop.STOP, "stop", None, [])
    assert done.usage.requests == 3
    assert done.usage.completion_tokens == sum(len(step.token_ids) for step in done.steps)
    assert model.tools is not None
    assert model.tools[0]["function"]["name"] == "add"
    priors = [prior for _, prior in model.seen]
    assert priors[0] is None
    assert [prior.token_ids for prior in priors[1:] if prior] == [
        step.token_ids for step in done.steps[:2]
    ]
    [sequence] = done.sequences
    assert unpack(sequence.mask).sum() == done.usage.completion_tokens
    row = env.rows("train")[0]
    state = load_state(done.state, row, done.completion, done.sequences)
    assert state["tool_defs"] == done.live["tool_defs"]
    assert state["completion"] == done.live["completion"]


async def test_the_environments_sampling_holds_where_the_run_names_none(loop: None) -> None:
    own = {"stop": ["\n"], "temperature": 0.2, "n": 4, "extra_body": {"top_k": 5}}
    model = Model("a")
    await run(load("loop_env", {"max_turns": 1, "sampling_args": own}), model, temperature=1.0)
    assert model.sampling == {"stop": ["\n"], "temperature": 1.0, "top_k": 5}


@pytest.mark.parametrize(
    ("script", "finish", "stop", "finish_reason"),
    [
        (["a", "b", "c"], "stop", Stop.STOP, "max_turns"),
        (["a", "b", "c"], "length", Stop.LENGTH, "length"),
        (["a", ContextOverflow("too many tokens")], "stop", Stop.TOO_LONG, "stop"),
        ([ContextOverflow("too many tokens")], "stop", Stop.TOO_LONG, ""),
        (["a"], "abort", Stop.CANCELLED, "abort"),
        (["a"], "content_filter", Stop.REFUSED, "content_filter"),
        (["", "", ""], "stop", Stop.STOP, "max_turns"),
    ],
)
async def test_every_ending_has_its_word(
    loop: None, script: list, finish: str, stop: Stop, finish_reason: str
) -> None:
    done = await run(load("loop_env", {}), Model(*script, finish=finish))
    assert (done.stop, done.finish_reason, done.error) == (stop, finish_reason, None)
    said = [text for text in script if isinstance(text, str)]
    assert [m["content"] for m in done.completion if m["role"] == "assistant"] == said
    assert len(done.steps) == len(said)


async def test_a_single_turn_that_calls_a_tool_ends_by_it(loop: None) -> None:
    done = await run(load("loop_env", {"max_turns": 1}), Model(tool_call("submit", "{}")))
    assert (done.stop, done.finish_reason) == (Stop.TOOL, "tool_calls")


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (InferenceError("500: out of memory", status=500, retryable=True), "InferenceError"),
        (InferenceError("400: bad request", status=400), "InferenceError"),
        (TimeoutError("300 s passed"), "TimeoutError"),
        (KeyError("choices"), "KeyError"),
    ],
)
async def test_a_failed_request_is_an_error_with_its_own_words(
    loop: None, raised: Exception, kind: str
) -> None:
    done = await run(load("loop_env", {}), Model("a", raised))
    assert done.stop is Stop.ERROR
    assert done.error is not None
    assert (done.error.type, done.error.message) == (kind, str(raised))
    assert done.completion[0]["content"] == "a", "what was said until then stays visible"
    assert done.usage.requests == 1


@pytest.mark.parametrize("denied", [
    RefusesAll("not for you", status=401),
    ServerUnavailable("no endpoint answered in 300 s", retryable=True),
])
async def test_what_every_sample_would_get_is_the_callers_to_decide(
    loop: None, denied: InferenceError
) -> None:
    with pytest.raises(InferenceError) as caught:
        await run(load("loop_env", {}), Model(denied))
    assert caught.value is denied


async def test_environment_code_that_raises_is_an_error(loop: None) -> None:
    done = await run(load("loop_env", {"mode": "broken"}), Model("a"))
    assert done.stop is Stop.ERROR
    assert done.error is not None
    assert (done.error.type, done.error.message) == ("RuntimeError", "the game is broken")


async def test_the_environments_own_time_limit_is_a_timeout(loop: None) -> None:
    async def never(*_: Any, **__: Any) -> Completion:
        await asyncio.sleep(60)
        raise AssertionError

    done = await run(load("loop_env", {"timeout_seconds": 0.05}), never)
    assert (done.stop, done.error.type) == (Stop.TIMEOUT, "timeout")


async def test_the_prior_is_the_longest_history_that_is_continued() -> None:
    asked = "what?"
    client = RolloutClient(Model("a", "b", "a", "c"))
    prompt = from_openai([{"role": "user", "content": asked}])
    first = await client.get_response(prompt, "m", {})
    longer = [*prompt, first.message, *prompt]
    second = await client.get_response(longer, "m", {})
    await client.get_response(prompt, "m", {})  # again: its history is as short as the first's
    await client.get_response([*longer, second.message, *prompt], "m", {})
    priors = [prior and prior.text for _, prior in client.client.seen]  # type: ignore[attr-defined]
    assert priors == [None, "a", None, "b"]


async def test_side_calls_cost_but_are_not_trained_on(loop: None) -> None:
    env = load("loop_env", {"mode": "asks", "max_turns": 2})
    model = Model("first", "side answer", "second")
    done = await run(env, model)
    assert [bytes(step.token_ids).decode() for step in done.steps] == ["first", "second"]
    assert done.usage.requests == 3
    assert len(done.sequences) == 1
    (_, side), (_, second) = model.seen[1:]
    assert side is None, "the side question continues nothing"
    assert second is not None
    assert second.text == "first", "the second turn continues the first, not the side answer"


async def test_a_rewritten_history_gives_several_sequences(loop: None) -> None:
    done = await run(load("loop_env", {"mode": "forgets"}), Model("a", "b", "c"))
    assert len(done.sequences) == 3
    assert done.lossy == []


@pytest.mark.parametrize("mode", ["", "asks", "forgets", "ends"])
async def test_the_state_comes_back_as_it_was(loop: None, mode: str) -> None:
    env = load("loop_env", {"mode": mode})
    row = env.rows("train")[0]
    done = await run(env, Model(*"abcdef"), max_tokens=5)
    assert done.lossy == []
    sample = Sample(
        i=0, completion=done.completion, sequences=done.sequences, stop=done.stop, state=done.state
    )
    sample = msgspec.json.decode(msgspec.json.encode(sample), type=Sample)
    state = load_state(sample.state, row, sample.completion, sample.sequences)
    live = done.live
    for key in live:
        if key not in ("client", "usage_tracker", "timing"):
            got, expected = state[key], live[key]
            if key == "trajectory":
                got, expected = map(comparable, got), map(comparable, expected)
                got, expected = list(got), list(expected)
            assert got == expected, key
    assert state["timing"].model_dump() == live["timing"].model_dump()
    assert state["prompt"] == live["prompt"]
    repeated = "begin here" in str(sample.state)
    assert repeated == (mode == "forgets"), "only a rewritten history is written out"


def comparable(step: Any) -> dict[str, Any]:
    """A trajectory step without what the wire rebuilds differently: the response's token copy."""
    response = step["response"].model_dump(exclude={"message": {"tokens"}})
    return {**step, "response": response}


@pytest.mark.parametrize(
    "value", [None, True, 1, -(2**60), 1.0, 0.1, "é\n", [], {}, {"a": [1, {"b": None}]}]
)
def test_plain_values_survive(value: object) -> None:
    assert survives(value)


@pytest.mark.parametrize(
    "value",
    [
        (), (1, 2), {1}, {1: 2}, {"a": (1,)}, float("nan"), float("-inf"), b"x", object(),
        Stop.STOP, 2**70, np.float64(1.5), np.int64(3), datetime(2026, 1, 1), OrderedDict(a=1),
        "\ud800", Usage(), lambda: 1,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_change_or_break_does_not_survive(value: object) -> None:
    assert not survives(value)


async def test_what_json_cannot_carry_is_named(loop: None) -> None:
    env = load("loop_env", {"mode": "keeps"})
    row = env.rows("train")[0]
    done = await run(env, Model("a", "b", "c"))
    assert done.lossy == ["by_int", "lock", "nan", "pair"]
    state = load_state(done.state, row, done.completion, done.sequences)
    assert state["board"] == {"a": [1, 2.5, None, True]}
    assert state["info"] == {"k": 1, "secret": "7"}, "a changed row travels as changed"
    assert not {"by_int", "lock", "nan", "pair"} & state.keys()
    wire, lossy = dump_state(done.live, row)
    assert [name for name in lossy if name.startswith("trajectory")] == [
        f"trajectory[{n}]" for n in range(3)
    ], "tokens that lie in no sequence are lost"
    assert wire["steps"] == []


async def test_a_text_from_elsewhere_gets_a_step_per_answer(loop: None) -> None:
    row = load("loop_env", {}).rows("train")[0]
    turns = [("assistant", "a"), ("user", "b"), ("assistant", "c")]
    said: list[Message] = [{"role": role, "content": text} for role, text in turns]
    state = load_state({}, row, said)
    assert [step["completion"][0].content for step in state["trajectory"]] == ["a", "c"]
    assert [len(step["prompt"]) for step in state["trajectory"]] == [1, 3]
