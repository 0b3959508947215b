"""verifiers v0 environments: load one by id, read its rows, run its own rollout loop.

verifiers itself (a second of imports and 230 MB) is imported by `load`, not with this module.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import logging
import threading
import types
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

from rollstream.shared.environments import rows as _rows
from rollstream.shared.environments import sequences as _sequences
from rollstream.shared.environments import strict
from rollstream.shared.environments.exact import survives
from rollstream.shared.environments.locate import (
    EnvironmentUnusable,
    code_identity,
    import_module,
    own_environments,
)
from rollstream.shared.environments.messages import to_openai
from rollstream.shared.environments.rows import Rows, Split
from rollstream.shared.environments.sequences import Turn
from rollstream.shared.inference.refusals import RefusesAll
from rollstream.shared.inference.types import Completion, ServerUnavailable
from rollstream.shared.records import EnvRef, Failure, Message, Row, Sequence, Stop, Usage

if TYPE_CHECKING:
    from verifiers.legacy.envs.environment import Environment as RawEnvironment
    from verifiers.legacy.types import State

    from rollstream.shared.environments.client import ChatCall, RolloutClient

__all__ = [
    "Environment", "EnvironmentUnusable", "Finished", "load", "own_environments", "parse_args",
]

log = logging.getLogger(__name__)
_one_at_a_time = threading.Lock()
"""Several runs load in threads: nobody may see a module before it is executed to its end."""


@dataclass(kw_only=True)
class Finished:
    """What became of one rollout, failures included."""

    completion: list[Message] = field(default_factory=list)
    steps: list[Turn] = field(default_factory=list)
    """The turns of the trajectory, in order."""
    sequences: list[Sequence] = field(default_factory=list)
    """The same as token sequences; none where the server can't tell ids."""
    stop: Stop
    finish_reason: str = ""
    """The last turn's own word; `max_turns` where the environment's limit ended the rollout."""
    error: Failure | None = None
    state: dict[str, Any] = field(default_factory=dict)
    lossy: list[str] = field(default_factory=list)
    """What of the state could not be written: such an environment is to be scored here, fused."""
    usage: Usage = field(default_factory=Usage)
    """Over all requests of the rollout, the environment's side calls included."""
    endpoint: str = ""
    attempts: int = 1
    """The most attempts that any of its requests took."""
    live: State | None = field(default=None, repr=False)
    """verifiers' own state, for scoring in this process; never leaves it."""


class Environment:
    """A loaded verifiers environment; made by `load`."""

    def __init__(self, raw: RawEnvironment, ref: EnvRef) -> None:
        self.raw = raw
        self.ref = ref
        self._splits: dict[Split, Rows] = {}

    @property
    def reward_functions(self) -> list[tuple[str, float]]:
        """Name and weight of every function that scores, over all rubrics in order."""
        return [
            (func.__name__, weight)
            for leaf in strict.leaves(self.raw.rubric)
            for func, weight in zip(leaf.funcs, leaf.weights, strict=True)
        ]

    @property
    def requires_group(self) -> bool:
        """Whether any reward function compares the samples of a group."""
        return any(leaf.has_group_rewards for leaf in strict.leaves(self.raw.rubric))

    def rows(self, split: Split) -> Rows:
        """The rows of a split, converted lazily; train rows with a warning where eval has none.

        Builds the dataset on the first call, which may read files or the network. Raises
        EnvironmentUnusable where it can't be built, is empty, or lacks a prompt.
        """
        if split not in self._splits:
            self._splits[split] = self._build(split)
        return self._splits[split]

    def dataset_fingerprint(self, split: Split) -> str:
        """sha256 over the split's rows, order included."""
        return _rows.fingerprint(self.rows(split))

    def parse_answer(self, row: Row, state: State) -> str | None:
        """What the environment's parser takes for the answer, as text."""
        try:
            parsed = self._routed(row).parser.parse_answer(state["completion"])
        except Exception as error:
            log.warning("the parser of %s raised %s: %s", self.ref.id, type(error).__name__, error)
            return None
        return None if parsed is None else str(parsed)

    async def rollout(
        self, row: Row, chat: ChatCall, model: str, sampling: dict[str, Any]
    ) -> Finished:
        """Run the environment's own loop for one sample, never scoring it.

        The environment's own sampling arguments hold where `sampling` doesn't name them. Whatever
        the environment or the server does ends in a Finished, except what every other sample would
        get too, RefusesAll and ServerUnavailable, and cancellation.
        """
        from rollstream.shared.environments.client import RolloutClient, flat_sampling

        client = RolloutClient(chat)
        merged = flat_sampling(self._routed(row).sampling_args) | sampling
        try:
            state = await self.raw.rollout(_rows.to_input(row), client, model, merged)  # type: ignore[arg-type]
            return self._finish(row, state, client)
        except (RefusesAll, ServerUnavailable):
            raise
        except Exception as error:
            failure = Failure(type(error).__name__, str(error) or type(error).__name__)
            return _failed(row, client, failure)

    def _finish(self, row: Row, state: State, client: RolloutClient) -> Finished:
        from rollstream.shared.environments.wire import dump_state

        steps = _trajectory_turns(state, client)
        stop, finish_reason, error = _ending(state, client, steps)
        if not stop.scored:
            return _failed(row, client, error, stop=stop, finish_reason=finish_reason)
        places = _sequences.places(steps)
        wire, lossy = dump_state(state, row, places)
        return Finished(
            completion=to_openai(state.get("completion") or []),
            steps=steps,
            sequences=_sequences.build(steps),
            stop=stop,
            finish_reason=finish_reason,
            error=error,
            state=wire,
            lossy=lossy,
            live=state,
            **_costs(client),
        )

    def _routed(self, row: Row) -> RawEnvironment:
        """The environment that handles this row: a member, where this is a group of them."""
        raw = self.raw
        route = row.info.get("env_id", [])
        for name in [route] if isinstance(route, str) else route:
            raw = (getattr(raw, "env_map", None) or {}).get(name, raw)
        return raw

    def _build(self, split: Split) -> Rows:
        try:
            train_only = self.raw.eval_dataset_source is None and self.raw.eval_dataset is None
            if split == "eval" and train_only:
                log.warning("%s has no eval rows: its train rows are used", self.ref.id)
                rows = Rows(self.raw.get_dataset(), fell_back=True)
            else:
                get = self.raw.get_dataset if split == "train" else self.raw.get_eval_dataset
                rows = Rows(get())
            if not len(rows):
                raise EnvironmentUnusable(
                    self.ref.id, f"its {split} dataset is empty: check args {_json(self.ref.args)}"
                )
            rows[0]  # a column that can't travel is better found here than in the middle of a run
        except EnvironmentUnusable:
            raise
        except Exception as error:
            raise EnvironmentUnusable(
                self.ref.id, f"its {split} dataset can't be read: {_explain(error)}"
            ) from error
        return rows


def load(env_id: str, args: dict[str, Any]) -> Environment:
    """Load as `vf.load_environment(env_id, **args)` does, in any thread.

    This project's own `environments/` are found by id, too. Signal handlers stay as they are, and
    verifiers' log lines are kept off the terminal. Raises EnvironmentUnusable.
    """
    if not isinstance(args, dict) or not survives(args):
        raise EnvironmentUnusable(env_id, f"args must be a JSON object, not {args!r:.200}")
    with _one_at_a_time:
        return _load(env_id, args)


def _load(env_id: str, args: dict[str, Any]) -> Environment:
    version = _import_verifiers(env_id)
    module = import_module(env_id)
    loader = getattr(module, "load_environment", None)
    if not callable(loader):
        raise EnvironmentUnusable(
            env_id, f"module {module.__name__} has no load_environment function: not a verifiers "
            "environment"
        )
    _check_args(env_id, loader, args)

    from verifiers.legacy.envs.environment import Environment as RawEnvironment
    from verifiers.legacy.utils.env_utils import load_environment

    try:
        raw = load_environment(env_id, **args)
    except (Exception, SystemExit) as error:
        # verifiers wraps what load_environment raised into an error of its own
        cause = error.__cause__ or error
        raise EnvironmentUnusable(
            env_id, f"load_environment({_json(args)}) failed: {_explain(cause)}"
        ) from error
    if not isinstance(raw, RawEnvironment):
        raise EnvironmentUnusable(
            env_id, f"load_environment returned a {type(raw).__name__}, not a verifiers v0 "
            "Environment (v1 tasksets need api v1)"
        )
    try:
        strict.install(raw.rubric)
    except ValueError as error:
        raise EnvironmentUnusable(env_id, str(error)) from error
    identity = _json([env_id, args, "v0", version, code_identity(module)])
    fingerprint = hashlib.sha256(identity.encode()).hexdigest()
    return Environment(raw, EnvRef(id=env_id, args=args, api="v0", fingerprint=fingerprint))


def parse_args(env_id: str, text: str) -> dict[str, Any]:
    """Arguments written as JSON on a command line. Raises EnvironmentUnusable."""
    try:
        args = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise EnvironmentUnusable(env_id, f"args {text!r} is no JSON: {error}") from error
    if not isinstance(args, dict):
        raise EnvironmentUnusable(env_id, f"args must be a JSON object, not {text!r}")
    return args


def _import_verifiers(env_id: str) -> str:
    """Import verifiers v0, kept quiet and away from the signal handlers; its version."""
    try:
        environment = importlib.import_module("verifiers.legacy.envs.environment")
        version = metadata.version("verifiers")
    except ImportError as error:
        raise EnvironmentUnusable(
            env_id, f"verifiers v0 is not usable here ({error}): pip install 'rollstream[env]'"
        ) from error
    # Environment.__init__ installs SIGINT and SIGTERM handlers that exit; a service has its own,
    # and outside the main thread the call itself would raise.
    environment.signal = types.SimpleNamespace(  # type: ignore[attr-defined]
        **{**vars(environment.signal), "signal": lambda *_: None}
    )
    logger = logging.getLogger("verifiers")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())  # else Python's last resort prints its warnings
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    return version


def _check_args(env_id: str, loader: Any, args: dict[str, Any]) -> None:
    signature = inspect.signature(loader)
    try:
        signature.bind(**args)
    except TypeError as error:
        parameters = ", ".join(map(str, signature.parameters.values())) or "none"
        raise EnvironmentUnusable(
            env_id, f"args {_json(args)}: {error}; load_environment takes {parameters}"
        ) from error


def _explain(error: BaseException) -> str:
    if isinstance(error, KeyError) and error.args in (("question",), ("prompt",)):
        return "the dataset has neither a 'prompt' nor a 'question' column: rename one to it"
    return f"{type(error).__name__}: {error}"


def _json(value: object) -> str:
    return _rows.canonical_json(value).decode()


def _trajectory_turns(state: State, client: RolloutClient) -> list[Turn]:
    """The turns that the environment put into its trajectory; side calls are not trained on."""
    return [
        next(
            (_sequences.turn_of(answer) for response, answer in client.answers
             if response is step["response"]),
            Turn(),
        )
        for step in state["trajectory"]
    ]


def _ending(
    state: State, client: RolloutClient, steps: list[Turn]
) -> tuple[Stop, str, Failure | None]:
    """verifiers' stop condition and the server's last word as our one reason."""
    finish_reason = steps[-1].finish_reason if steps else ""
    condition = state.get("stop_condition")
    if client.ended is not None:
        stop, answer = client.ended
        return stop, answer.finish_reason, None
    if (error := state.get("error")) is not None:
        cause = error.__cause__ or error
        message = str(cause) or str(error) or type(cause).__name__
        return Stop.ERROR, finish_reason, Failure(type(cause).__name__, message)
    if state.get("timed_out"):
        return Stop.TIMEOUT, finish_reason, Failure(
            "timeout", "the environment's own time limit (timeout_seconds) passed"
        )
    if state.get("prompt_too_long"):
        return Stop.TOO_LONG, finish_reason, None
    if finish_reason == "length" or condition == "max_total_completion_tokens_reached":
        return Stop.LENGTH, finish_reason, None
    if condition == "max_turns_reached" and len(steps) > 1:
        return Stop.STOP, "max_turns", None
    if finish_reason == "tool_calls":
        return Stop.TOOL, finish_reason, None
    return Stop.STOP, finish_reason, None


def _failed(
    row: Row,
    client: RolloutClient,
    error: Failure | None,
    *,
    stop: Stop = Stop.ERROR,
    finish_reason: str = "",
) -> Finished:
    """A rollout without a reward: what was said until then stays visible."""
    answers: list[Completion] = [answer for _, answer in client.answers]
    completion: list[Message] = []
    if client.state is not None:
        completion = to_openai(client.state.get("completion") or [])
    if client.ended is not None:
        answers.append(client.ended[1])
        completion.append(client.ended[1].message)
    return Finished(
        completion=completion,
        steps=[_sequences.turn_of(answer) for answer in answers],
        stop=stop,
        finish_reason=finish_reason or (answers[-1].finish_reason if answers else ""),
        error=error,
        **_costs(client),
    )


def _costs(client: RolloutClient) -> dict[str, Any]:
    answers = [answer for _, answer in client.answers]
    if client.ended is not None:
        answers.append(client.ended[1])
    costs = [answer.usage.cost_usd for answer in answers if answer.usage.cost_usd is not None]
    usage = Usage(
        prompt_tokens=sum(answer.usage.prompt_tokens for answer in answers),
        completion_tokens=sum(answer.usage.completion_tokens for answer in answers),
        cached_tokens=sum(answer.usage.cached_tokens for answer in answers),
        reasoning_tokens=sum(answer.usage.reasoning_tokens for answer in answers),
        requests=len(answers),
        cost_usd=sum(costs) if costs else None,
    )
    return {
        "usage": usage,
        "endpoint": answers[-1].endpoint if answers else "",
        "attempts": max((answer.attempts for answer in answers), default=1),
    }
