"""An environment's State on the wire: plain JSON, exact or reported as lossy, never a pickle.

The record around it already carries the row, the completion and the tokens; a step of the
trajectory therefore says only where in them it lies.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from rollstream.shared.arrays import unpack
from rollstream.shared.environments.exact import same, survives
from rollstream.shared.environments.messages import from_openai, to_openai
from rollstream.shared.environments.rows import to_input
from rollstream.shared.environments.sequences import Place
from rollstream.shared.records import Message, Row, Sequence

if TYPE_CHECKING:
    from verifiers.legacy.types import Response, State, TrajectoryStep

# Written in a form of their own, rebuilt by load_state, or meaningless outside the rollout.
_OWN_FORM = frozenset({
    "advantage", "client", "completion", "error", "final_env_response", "input", "metrics",
    "reward", "task", "timing", "tool_defs", "trajectory", "usage", "usage_tracker",
})


def dump_state(
    state: State, row: Row, places: Seq[Place | None] = ()
) -> tuple[dict[str, Any], list[str]]:
    """The state beside its row, completion and sequences, and the names of what got lost.

    `places` says per trajectory step where its tokens lie in the sample's sequences. Whatever
    JSON can't give back with equal value and type (handles, tuples, integer keys, NaN, models in
    keys of the environment's own) is left out and named.
    """
    prompt, completion = to_openai(state["prompt"]), to_openai(state.get("completion") or [])
    conversation = prompt + completion
    own: dict[str, Any] = {k: v for k, v in state.items() if k not in _OWN_FORM}
    lossy = sorted(key for key, value in own.items() if not survives(value))
    wire: dict[str, Any] = {"keys": {k: v for k, v in own.items() if k not in lossy}}

    if not _messages_survive(state.get("completion") or []):
        lossy.append("completion")
    wire |= _dump_input(state, row, prompt, lossy)
    steps = []
    for number, step in enumerate(state["trajectory"]):
        place = places[number] if number < len(places) else None
        dumped = _dump_step(step, conversation, place)
        if not survives(dumped) or not _tokens_lie_there(step, place):
            lossy.append(f"trajectory[{number}]")
            continue
        steps.append(dumped)
    wire["steps"] = steps
    if (final := state.get("final_env_response")) is not None:
        wire["final_env_response"] = to_openai(final)
    if tools := state.get("tool_defs"):
        wire["tool_defs"] = [tool.model_dump(mode="json", exclude_none=True) for tool in tools]
    if (tracker := state.get("usage_tracker")) is not None and (usage := tracker.snapshot()):
        wire["usage"] = dict(usage)
    if (timing := state.get("timing")) is not None:
        wire["timing"] = timing.model_dump(mode="json", round_trip=True)
    return wire, lossy


def load_state(
    wire: dict[str, Any],
    row: Row,
    completion: list[Message],
    sequences: Seq[Sequence] = (),
) -> State:
    """The State as the environment's rubric saw it, ready to be scored.

    An empty `wire` (a text that came from elsewhere) gives one step per assistant message.
    """
    from verifiers.legacy.types import RolloutTiming, State, Tool, flatten_task_input
    from verifiers.legacy.utils.usage_utils import StateUsageTracker

    from rollstream.shared.environments.client import RolloutClient, no_model

    wire = copy.deepcopy(wire)
    fields = flatten_task_input(to_input(row)) | wire.get("input", {})
    for name in wire.get("absent", ()):
        fields.pop(name, None)
    conversation = to_openai(fields["prompt"]) + completion
    fields["prompt"] = from_openai(to_openai(fields["prompt"]))

    tracker = StateUsageTracker()
    if usage := wire.get("usage"):
        tracker.increment(usage["input_tokens"], usage["output_tokens"])
    final = wire.get("final_env_response")
    steps = wire["steps"] if wire else _steps_of(len(fields["prompt"]), conversation)
    keys = {
        "is_completed": True, "is_truncated": False, "trajectory_id": "", "model": "",
        "sampling_args": {}, "stop_condition": None,
        **wire.get("keys", {}),
        "task": fields,
        "client": RolloutClient(no_model),
        "completion": from_openai(completion),
        "tool_defs": [Tool.model_validate(tool) for tool in wire.get("tool_defs", ())],
        "final_env_response": None if final is None else from_openai(final),
        "usage_tracker": tracker, "usage": tracker.usage,
        "timing": RolloutTiming.model_validate(wire.get("timing", {})),
        "error": None, "reward": None, "metrics": None,
    }
    state = State(input=fields)
    for key, value in keys.items():
        dict.__setitem__(state, key, value)  # State's own setter would forward into the input
    dict.__setitem__(state, "trajectory", [
        _load_step(step, conversation, sequences, state) for step in steps
    ])
    return state


def _dump_input(
    state: State, row: Row, prompt: list[Message], lossy: list[str]
) -> dict[str, Any]:
    """What the environment changed of its row."""
    from verifiers.legacy.types import flatten_task_input

    live: dict[str, Any] = {**state["input"], "prompt": prompt}
    given = flatten_task_input(to_input(row))
    given["prompt"] = to_openai(given["prompt"])
    changed = {k: v for k, v in live.items() if k not in given or not same(v, given[k])}
    lost = sorted(key for key, value in changed.items() if not survives(value))
    lossy += [f"input.{key}" for key in lost]
    wire: dict[str, Any] = {}
    if kept := {key: value for key, value in changed.items() if key not in lost}:
        wire["input"] = kept
    if absent := sorted(given.keys() - live.keys()):
        wire["absent"] = absent
    return wire


def _dump_step(
    step: TrajectoryStep, conversation: list[Message], place: Place | None
) -> dict[str, Any]:
    prompt, completion = to_openai(step["prompt"]), to_openai(step["completion"])
    at, end = len(prompt), len(prompt) + len(completion)
    in_line = conversation[:end] == prompt + completion
    dumped: dict[str, Any] = {"at": [at, end]} if in_line else {
        "prompt": prompt, "completion": completion,
    }
    if step["is_truncated"]:
        dumped["is_truncated"] = True
    if step["extras"]:
        dumped["extras"] = step["extras"]
    for key in ("reward", "advantage"):
        if step[key] is not None:
            dumped[key] = step[key]
    if step["tokens"] is not None and place is not None:
        dumped["tokens"] = list(place)
    if (response := step["response"]) is not None:
        message = response.message
        dumped["response"] = {
            "model": response.model,
            "finish_reason": message.finish_reason,
            "usage": None if response.usage is None else response.usage.model_dump(mode="json"),
        }
    return dumped


def _tokens_lie_there(step: TrajectoryStep, place: Place | None) -> bool:
    """False where the tokens are in no sequence, or the environment's max_seq_len cut them."""
    tokens = step["tokens"]
    if tokens is None or place is None:
        return tokens is None
    start, length = place.start, place.end - place.start
    return (len(tokens["prompt_ids"]), len(tokens["completion_ids"])) == (start, length)


def _load_step(
    step: dict[str, Any],
    conversation: list[Message],
    sequences: Seq[Sequence],
    state: State,
) -> TrajectoryStep:
    from verifiers.legacy.types import TrajectoryStep, TrajectoryStepTokens

    if "at" in step:
        at, end = step["at"]
        prompt, completion = conversation[:at], conversation[at:end]
    else:
        prompt, completion = step["prompt"], step["completion"]
    truncated: bool = step.get("is_truncated", False)
    tokens = None
    if "tokens" in step:
        number, start, stop = step["tokens"]
        ids = unpack(sequences[number].tokens)[:stop].tolist()
        logprobs = sequences[number].logprobs
        tokens = TrajectoryStepTokens(
            prompt_ids=ids[:start],
            prompt_mask=[0] * start,
            completion_ids=ids[start:],
            completion_mask=[1] * (stop - start),
            completion_logprobs=[] if logprobs is None else unpack(logprobs)[start:stop].tolist(),
            overlong_prompt=False,
            is_truncated=False,
            routed_experts=None,
        )
    return TrajectoryStep(
        prompt=from_openai(prompt),
        completion=from_openai(completion),
        response=_load_response(step.get("response"), completion, truncated),
        tokens=tokens,
        reward=step.get("reward"),
        advantage=step.get("advantage"),
        is_truncated=truncated,
        trajectory_id=state["trajectory_id"],
        extras=step.get("extras", {}),
    )


def _load_response(
    wire: dict[str, Any] | None, completion: list[Message], truncated: bool
) -> Response:
    from verifiers.legacy.types import Response, ResponseMessage, Usage

    wire = wire or {"model": "", "finish_reason": None, "usage": None}
    answer = [message for message in completion if message["role"] == "assistant"]
    fields = from_openai(answer[-1:])[0].model_dump(exclude_none=True) if answer else {}
    usage = wire["usage"]
    return Response(
        id="",
        created=0,
        model=wire["model"],
        usage=None if usage is None else Usage.model_validate(usage),
        message=ResponseMessage(
            **fields, finish_reason=wire["finish_reason"], is_truncated=truncated
        ),
    )


def _steps_of(prompt_length: int, conversation: list[Message]) -> list[dict[str, Any]]:
    return [
        {"at": [number, number + 1]}
        for number, message in enumerate(conversation)
        if number >= prompt_length and message["role"] == "assistant"
    ]


def _messages_survive(messages: Seq[Any]) -> bool:
    """Whether OpenAI's plain form gives back the models as they are."""
    back = from_openai(to_openai(messages))
    return all(
        type(a) is type(b) and a.model_dump(exclude_none=True) == b.model_dump(exclude_none=True)
        for a, b in zip(messages, back, strict=True)
    )
