"""Scores equal verifiers' own where nothing fails; where something fails it is never a 0."""

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollstream.shared.environments.client import RolloutClient
from rollstream.shared.environments.locate import import_module
from rollstream.shared.environments.scoring import SampleScore, score_finished, score_group
from rollstream.shared.environments.v0 import Environment, load
from rollstream.shared.inference.types import Completion
from rollstream.shared.records import Message, RewardPart, Row, Sample, Stop

ODD = '''
import asyncio
import verifiers as vf
from datasets import Dataset

def text_of(completion):
    return completion[-1].content

def sync_length(completion, answer, bonus, **kwargs):
    return len(text_of(completion)) / 7 + bonus

async def async_match(prompt, completion, answer, info, threshold):
    await asyncio.sleep(0)
    return 1.0 if answer in text_of(completion) and info["level"] > threshold else 0.1

def penalty(completion):
    return text_of(completion).count("!")

def seen_by_metric(state, task):
    return float(len(state["trajectory"]) + len(task["prompt"]))

def tokens_of(state):
    return len(state["trajectory"][0]["tokens"]["completion_ids"])

def ranks(completions, answers, states) -> list:
    lengths = [len(text_of(completion)) for completion in completions]
    return [sorted(lengths).index(length) / 3 for length in lengths]

def raises(completion):
    if "boom" in text_of(completion):
        raise KeyError("verdict")
    return 1.0

def not_finite(completion):
    return float("inf") if "boom" in text_of(completion) else 1.0

def no_number(completion):
    return None if "boom" in text_of(completion) else 1.0

def group_raises(completions):
    raise RuntimeError("judge is down")

def group_short(completions):
    return [1.0] * (len(completions) - 1)

def group_nan(completions):
    return [float("nan") if "boom" in text_of(c) else 1.0 for c in completions]

async def asks_the_policy(state, completion):
    client = state["client"]
    answer = await client.get_response(prompt=completion, model="m", sampling_args={})
    return len(answer.message.content)

class OwnLoop(vf.Rubric):
    async def score_group(self, states):
        for state in states:
            state["reward"], state["metrics"] = 2.5, {"own": 1.0}

def load_environment(bad="", weight=1.0, own_loop=False, parts=1):
    first = vf.Rubric(
        funcs=[sync_length, async_match, penalty, seen_by_metric, tokens_of],
        weights=[0.3, 2.0, -0.7, 0.0, 0.01],
    )
    first.add_class_object("threshold", 1)
    second = vf.Rubric(funcs=[ranks, sync_length], weights=[1.5, 0.1])
    rubric = vf.RubricGroup([first, vf.RubricGroup([second])])
    if bad:
        rubric = vf.RubricGroup([rubric, vf.Rubric(funcs=[globals()[bad]], weights=[weight])])
    if own_loop:
        rubric = OwnLoop(funcs=[penalty])
    rows = [{"question": "q", "answer": "7", "info": '{"level": 2}', "bonus": 0.25}]
    envs = [
        vf.SingleTurnEnv(
            dataset=Dataset.from_list(rows), rubric=rubric, parser=vf.Parser(str.upper)
        )
        for _ in range(parts)
    ]
    return envs[0] if parts == 1 else vf.EnvGroup(envs)
'''

ANSWERS = ["it is 7", "no!", "7 boom!!", "7"]


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "odd_env.py").write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    sys.modules.pop("odd_env", None)
    return "odd_env"


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call_add(a: int, b: int) -> Message:
    function = {"name": "add", "arguments": f'{{"a": {a}, "b": {b}}}'}
    call = {"id": f"c{a}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


class Scripts:
    """Rollout r gets the r-th script; a later turn is known by the answer it continues."""

    def __init__(self, scripts: list[list[Message]]) -> None:
        self.waiting = iter(scripts)
        self.rest: dict[int, list[Message]] = {}
        self.kept: list[Completion] = []

    async def __call__(self, messages: Any, *, tools: Any, sampling: Any, prior: Any) -> Completion:
        script = next(self.waiting) if prior is None else self.rest[id(prior)]
        message = script[0]
        sampled = list(str(message).encode())
        history = [] if prior is None else prior.prompt_ids + prior.token_ids
        completion = Completion(
            text=message["content"] or "", message=message,
            finish_reason="tool_calls" if "tool_calls" in message else "stop",
            prompt_ids=[*history, 1, 2], token_ids=sampled, logprobs=[-0.5] * len(sampled),
        )
        self.kept.append(completion)  # ids stay unique while it lives
        self.rest[id(completion)] = script[1:]
        return completion


async def samples_of(env: Environment, row: Row, scripts: list[list[Message]]) -> list[Sample]:
    """Our own rollouts, through the wire."""
    chat = Scripts(scripts)
    done = [await env.rollout(row, chat, "m", {}) for _ in scripts]
    assert [one.lossy for one in done] == [[]] * len(done)
    samples = [
        Sample(i=i, completion=one.completion, sequences=one.sequences, stop=one.stop,
               state=one.state)
        for i, one in enumerate(done)
    ]
    return msgspec.json.decode(msgspec.json.encode(samples), type=list[Sample])


async def verifiers_own(
    env_id: str, args: dict, scripts: list[list[Message]]
) -> list[tuple[float, dict[str, float]]]:
    """What verifiers gives in-process, by its own run_group on an instance of its own."""
    raw = import_module(env_id).load_environment(**args)
    record = raw.get_dataset()[0]
    outputs = await raw.run_group(
        [record for _ in scripts], RolloutClient(Scripts(scripts)), "m", {}
    )
    return [(output["reward"], output["metrics"]) for output in outputs]


ADDITIONS = [[say(text)] for text in ("30 + 32 = 62", "62", "no idea", "30 + 32 = 61, so 62")]
TOOLS = [
    [call_add(1, 2), call_add(3, 4), say("it is 12")],
    [say("1992")],
    [call_add(5, 6), say("")],
    [call_add(n, n) for n in range(10, 16)],
]


@pytest.mark.parametrize(
    ("env_id", "args", "scripts"),
    [
        ("two_digit_addition", {}, ADDITIONS),
        ("tool_addition", {}, TOOLS),
        ("group_ranking", {}, [[say(f"{'so ' * n}{n % 3 + 101}")] for n in range(8)]),
        ("odd_env", {}, [[say(text)] for text in ANSWERS]),
        ("odd_env", {"parts": 2}, [[say(text)] for text in ANSWERS]),
        ("odd_env", {"own_loop": True}, [[say(text)] for text in ANSWERS]),
    ],
)
async def test_equal_to_verifiers_own(
    odd: str, env_id: str, args: dict, scripts: list[list[Message]]
) -> None:
    env = load(env_id, args)
    row = env.rows("train")[0]
    if env_id == "tool_addition":
        scripts = [*scripts[:1], [say(f"the sum is {row.answer}")], *scripts[2:]]
    if env_id == "group_ranking":
        scripts = [[say(f"{'so ' * n}{row.answer if n % 3 else 0}")] for n in range(8)]
    samples = await samples_of(env, row, scripts)
    scores = await score_group(env, row, samples)
    expected = await verifiers_own(env_id, args, scripts)
    assert [(score.reward, score.metrics) for score in scores] == expected
    assert len({score.reward for score in scores}) > 1 or "own_loop" in args
    for score in scores:
        assert score.failure is None
        assert score.reward is not None
        total = sum(part.value * part.weight for part in score.rewards)
        assert math.isclose(total, score.reward, rel_tol=1e-9, abs_tol=1e-9)


async def test_live_states_score_as_those_from_the_wire(odd: str) -> None:
    env = load(odd, {})
    row = env.rows("train")[0]
    chat = Scripts([[say(text)] for text in ANSWERS])
    done = [await env.rollout(row, chat, "m", {}) for _ in ANSWERS]
    wired = await score_group(
        env, row, await samples_of(env, row, [[say(text)] for text in ANSWERS])
    )
    assert await score_finished(env, row, done) == wired


async def test_functions_weights_and_parsed_answers_are_reported(odd: str) -> None:
    env = load(odd, {})
    row = env.rows("train")[0]
    functions = env.reward_functions
    assert functions == [
        ("sync_length", 0.3), ("async_match", 2.0), ("penalty", -0.7), ("seen_by_metric", 0.0),
        ("tokens_of", 0.01), ("ranks", 1.5), ("sync_length", 0.1), ("num_turns", 0.0),
    ]
    assert env.requires_group
    assert load(odd, {"parts": 2}).requires_group
    assert not load("two_digit_addition", {}).requires_group
    scores = await score_group(env, row, await samples_of(env, row, [[say("a 7!")]]))
    assert [(part.source, part.weight) for part in scores[0].rewards] == functions
    assert scores[0].rewards[2] == RewardPart("penalty", 1.0, -0.7)
    assert scores[0].parsed_answer == "A 7!"


async def score_bad(odd: str, bad: str, weight: float = 1.0) -> list[SampleScore]:
    env = load(odd, {"bad": bad, "weight": weight})
    row = env.rows("train")[0]
    return await score_group(
        env, row, await samples_of(env, row, [[say(text)] for text in ANSWERS])
    )


BOOM = 2  # the answer that the bad functions stumble over


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        ("raises", "reward_raised", "raises: KeyError: 'verdict'"),
        ("not_finite", "reward_not_finite", "not_finite: returned inf"),
        ("no_number", "reward_not_a_number", "no_number: returned NoneType None"),
        ("group_nan", "reward_not_finite", "group_nan: returned nan"),
    ],
)
async def test_a_failing_function_takes_only_its_samples_reward(
    odd: str, bad: str, kind: str, message: str
) -> None:
    scores = await score_bad(odd, bad)
    assert [score.reward is None for score in scores] == [n == BOOM for n in range(4)]
    failure = scores[BOOM].failure
    assert failure is not None
    assert (failure.type, failure.message) == (kind, message)
    assert bad not in scores[BOOM].metrics
    assert bad not in [part.source for part in scores[BOOM].rewards]
    assert scores[BOOM].metrics["penalty"] == 2.0, "the others' values stay"
    assert scores[0].metrics[bad] == 1.0


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        ("group_raises", "reward_raised", "group_raises: RuntimeError: judge is down"),
        ("group_short", "wrong_length", "group_short: 3 values for 4 samples"),
    ],
)
async def test_a_failing_group_function_takes_all_rewards(
    odd: str, bad: str, kind: str, message: str
) -> None:
    scores = await score_bad(odd, bad)
    assert [score.reward for score in scores] == [None] * 4
    assert {(s.failure.type, s.failure.message) for s in scores if s.failure} == {(kind, message)}


@pytest.mark.parametrize("bad", ["raises", "not_finite", "group_raises", "group_nan"])
async def test_a_failing_zero_weight_function_loses_only_its_metric(odd: str, bad: str) -> None:
    scores = await score_bad(odd, bad, weight=0.0)
    expected = await verifiers_own(odd, {}, [[say(text)] for text in ANSWERS])
    assert [score.reward for score in scores] == [reward for reward, _ in expected]
    assert scores[BOOM].failure is None
    assert bad not in scores[BOOM].metrics


async def test_a_rubric_that_asks_the_policy_is_no_zero(odd: str) -> None:
    for score in await score_bad(odd, "asks_the_policy"):
        assert score.reward is None
        assert score.failure is not None
        assert score.failure.message.startswith("asks_the_policy: ModelError: this environment")


async def test_samples_without_the_models_fault_do_not_meet_the_rubric(odd: str) -> None:
    env = load(odd, {})
    row = env.rows("train")[0]
    texts = [[say(text)] for text in ANSWERS]
    samples = await samples_of(env, row, texts)
    for n, stop in ((1, Stop.ERROR), (2, Stop.TIMEOUT)):
        samples[n] = Sample(i=n, stop=stop)
    scores = await score_group(env, row, samples)
    expected = await verifiers_own(odd, {}, [texts[0], texts[3]])
    assert [(s.reward, s.metrics) for s in (scores[0], scores[3])] == expected
    assert scores[1] == scores[2] == SampleScore()
    gone = [Sample(i=0, stop=Stop.CANCELLED), Sample(i=1, stop=Stop.REFUSED)]
    assert await score_group(env, row, gone) == [SampleScore(), SampleScore()]


async def test_a_state_that_cannot_be_read_withholds_the_group(odd: str) -> None:
    env = load(odd, {})
    row = env.rows("train")[0]
    samples = await samples_of(env, row, [[say(text)] for text in ANSWERS])
    samples[1].sequences = []
    scores = await score_group(env, row, samples)
    assert {score.failure.type for score in scores if score.failure} == {"state_unreadable"}
    assert [score.reward for score in scores] == [None] * 4
