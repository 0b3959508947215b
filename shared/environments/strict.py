"""Reward functions that cannot fail in silence.

verifiers logs whatever a reward function raises and goes on with 0.0; nothing in the state tells.
Here every function of a rubric tree is wrapped once, so that a scoring call can ask afterwards what
each function gave for each state and which ones failed. verifiers' own loop still does the scoring.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from rollstream.shared.records import Failure, RewardPart

if TYPE_CHECKING:
    from verifiers.legacy.rubrics.rubric import Rubric
    from verifiers.legacy.types import State

_MARK = "_rollstream_strict"


class Failed(NamedTuple):
    """One function that failed on one state."""

    source: str
    weight: float
    failure: Failure


class Record:
    """What each function gave or how it failed, per state, in the order of scoring."""

    def __init__(self, states: Sequence[State]) -> None:
        self.states = states
        self.parts: dict[int, list[RewardPart]] = {id(state): [] for state in states}
        self.failed: dict[int, list[Failed]] = {id(state): [] for state in states}


class _BadValue(ValueError):
    """A function's value that is no reward."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


_record: ContextVar[Record | None] = ContextVar("reward_record", default=None)
# The states the running function is called for; None where a rubric's own loop calls it.
_called_for: ContextVar[Sequence[State] | None] = ContextVar("reward_states", default=None)


@contextmanager
def recording(states: Sequence[State]) -> Iterator[Record]:
    """Within, every installed function reports to the record given here."""
    record = Record(states)
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


def leaves(rubric: Rubric) -> Iterator[Rubric]:
    """The rubrics whose functions are scored: below groups of rubrics and of environments."""
    children: list[Rubric] = list(getattr(rubric, "rubrics", []))
    children += [env.rubric for env in (getattr(rubric, "env_map", None) or {}).values()]
    if not children:
        yield rubric
    for child in children:
        yield from leaves(child)


def install(rubric: Rubric) -> None:
    """Wrap every function of the tree; a second time does nothing.

    Raises ValueError for a function without a name, which verifiers can't score either.
    """
    for leaf in leaves(rubric):
        if getattr(leaf, _MARK, False):
            continue
        for func in leaf.funcs:
            if not hasattr(func, "__name__"):
                raise ValueError(
                    f"reward function {func!r} has no __name__, which verifiers needs: "
                    "wrap it in a def"
                )
        leaf.funcs = [
            _strict(func, weight, group=leaf._is_group_func(func))
            for func, weight in zip(leaf.funcs, leaf.weights, strict=True)
        ]
        _attribute_calls(leaf)
        setattr(leaf, _MARK, True)


def _attribute_calls(leaf: Rubric) -> None:
    """Let the wrappers know which states verifiers is calling them for."""
    one, group = leaf._call_individual_reward_func, leaf._call_group_reward_func

    async def call_one(func: Any, state: State) -> float:
        token = _called_for.set([state])
        try:
            return await one(func, state)
        finally:
            _called_for.reset(token)

    async def call_group(func: Any, states: list[State]) -> list[float]:
        token = _called_for.set(states)
        try:
            return await group(func, states)
        finally:
            _called_for.reset(token)

    vars(leaf).update(_call_individual_reward_func=call_one, _call_group_reward_func=call_group)


def _strict(func: Callable[..., Any], weight: float, *, group: bool) -> Callable[..., Any]:
    """The function, reporting; sync stays sync, so that a rubric may call it either way."""
    source = func.__name__
    func = getattr(func, "__wrapped__", func) if getattr(func, _MARK, False) else func
    checked = functools.partial(_check_group if group else _check_one, source, weight)

    @functools.wraps(func)
    def strict(*args: Any, **kwargs: Any) -> Any:
        record = _record.get()
        if record is None:
            return func(*args, **kwargs)
        try:
            value = func(*args, **kwargs)
        except Exception as error:
            _fail(record, source, weight, error)
            raise
        if inspect.isawaitable(value):
            return awaited(record, value)
        return checked(record, value)

    async def awaited(record: Record, awaitable: Any) -> Any:
        try:
            # waits: the process that runs it is killed at the deadline
            value = await awaitable
        except Exception as error:
            _fail(record, source, weight, error)
            raise
        return checked(record, value)

    setattr(strict, _MARK, True)
    return strict


def _check_one(source: str, weight: float, record: Record, value: Any) -> float:
    states = _called_for.get()
    try:
        number = _number(value)
    except _BadValue as bad:
        _fail(record, source, weight, bad)
        raise
    if states is not None:
        record.parts[id(states[0])].append(RewardPart(source, number, weight))
    return number


def _check_group(source: str, weight: float, record: Record, value: Any) -> list[float]:
    states = _called_for.get() or record.states
    try:
        values = list(value)
    except TypeError as error:
        _fail(record, source, weight, error)
        raise
    if len(values) != len(states):
        bad = _BadValue(Failure("wrong_length", f"{len(values)} values for {len(states)} samples"))
        _fail(record, source, weight, bad)
        raise bad
    numbers = []
    for state, item in zip(states, values, strict=True):
        try:
            numbers.append(_number(item))
        except _BadValue as bad:
            _fail(record, source, weight, bad, [state])
            numbers.append(0.0)  # only verifiers sees it: this state's reward is withheld
        else:
            record.parts[id(state)].append(RewardPart(source, numbers[-1], weight))
    return numbers


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        kind = type(value).__name__
        raise _BadValue(Failure("reward_not_a_number", f"returned {kind} {value!r:.80}")) from error
    if not math.isfinite(number):
        raise _BadValue(Failure("reward_not_finite", f"returned {number}"))
    return number


def _fail(
    record: Record,
    source: str,
    weight: float,
    error: Exception,
    states: Sequence[State] | None = None,
) -> None:
    if isinstance(error, _BadValue):
        failure = Failure(error.failure.type, f"{source}: {error.failure.message}")
    else:
        failure = Failure("reward_raised", f"{source}: {type(error).__name__}: {error}")
    for state in states or _called_for.get() or record.states:
        record.failed[id(state)].append(Failed(source, weight, failure))
