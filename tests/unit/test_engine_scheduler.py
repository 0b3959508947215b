"""Who runs when, and how sequences end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from rollstream.services.engine.scheduler import Scheduler
from rollstream.services.engine.sequences import Sampling, Sequence, Span, TokenChoice

EOS = 0


class Speller:
    """An executor that spells out each sequence's prompt again, token by token, for ever."""

    def __init__(self) -> None:
        self.started: list[Sequence] = []
        self.held: set[Sequence] = set()

    def has_room(self, sequence: Sequence) -> bool:
        return len(self.held) == 0 or len(sequence.prompt) < 10

    def repeats_running_work(self, sequence: Sequence) -> bool:
        return sequence.prompt in [other.prompt for other in self.held]

    def start(self, sequence: Sequence) -> None:
        self.started.append(sequence)
        self.held.add(sequence)

    def advance(self, running: Iterable[Sequence]) -> list[tuple[Sequence, TokenChoice | None]]:
        return [
            (s, TokenChoice(s.prompt[len(s.output) % len(s.prompt)], -1.0, 1, []))
            for s in running
        ]

    def release(self, sequence: Sequence) -> None:
        self.held.remove(sequence)


def scheduler(executor: Speller, max_batch: int = 8, max_model_len: int = 100) -> Scheduler:
    return Scheduler(
        executor, decode=lambda ids, _: "".join(map(chr, ids)), eos_token=EOS,
        max_batch=max_batch, max_model_len=max_model_len,
    )


def sequence(text: str, priority: int = 0, **how: Any) -> Sequence:
    prompt = [EOS if c == "." else ord(c) for c in text]
    wanted: dict[str, Any] = {"max_tokens": 20} | how
    return Sequence(f"id-{text}", 0, prompt, Sampling(**wanted), priority)


def finish(one: Sequence) -> Sequence:
    executor = Speller()
    engine = scheduler(executor)
    engine.add(one)
    for _ in range(100):
        if engine.idle:
            break
        engine.step()
    assert engine.idle
    assert not executor.held
    return one


@pytest.mark.parametrize(
    ("text", "how", "ends"),
    [
        ("abc.", {}, ("abc", "stop", None, 4)),
        ("abc.", {"ignore_eos": True, "max_tokens": 6}, ("abc\0ab", "length", None, 6)),
        ("abcd", {"max_tokens": 3}, ("abc", "length", None, 3)),
        ("abcd", {"stop_token_ids": frozenset([ord("c")])}, ("ab", "stop", ord("c"), 3)),
        ("abcd", {"stop": ("bc",)}, ("a", "stop", "bc", 3)),
        ("abcd", {"stop": ("d", "cd", "zz")}, ("ab", "stop", "cd", 4)),
        ("abcd", {"stop": ("da",), "max_tokens": 5}, ("abc", "stop", "da", 5)),
    ],
)
def test_ends(text: str, how: dict[str, Any], ends: tuple[Any, ...]) -> None:
    done = finish(sequence(text, **how))
    assert (done.text, done.finish_reason, done.stop_reason, len(done.output)) == ends


def test_the_model_s_length_ends_a_sequence() -> None:
    engine = scheduler(Speller(), max_model_len=10)
    one = sequence("abcd", max_tokens=50)
    engine.add(one)
    while not engine.idle:
        engine.step()
    assert (one.finish_reason, len(one.output)) == ("length", 6)


def test_the_batch_is_bounded_and_refilled_by_priority_then_arrival() -> None:
    executor = Speller()
    engine = scheduler(executor, max_batch=2)
    texts = ["a", "b", "c", "d", "e"]
    for text, priority in zip(texts, [0, 0, 5, 0, -1], strict=True):
        engine.add(sequence(text, priority, max_tokens=1))
    sizes = []
    while not engine.idle:
        sizes.append(len(engine.step()))
    assert [chr(s.prompt[0]) for s in executor.started] == ["e", "a", "b", "d", "c"]
    assert sizes == [2, 2, 1]


def test_sequences_join_a_running_batch() -> None:
    engine = scheduler(Speller())
    first, second = sequence("ab", max_tokens=4), sequence("xy", max_tokens=4)
    engine.add(first)
    engine.step()
    engine.add(second)
    engine.step()
    assert (first.output, second.output) == ([*map(ord, "ab")], [ord("x")])


def test_nobody_overtakes_one_that_waits_for_memory() -> None:
    executor = Speller()
    engine = scheduler(executor)
    for text in ["ab", "a long prompt", "cd"]:
        engine.add(sequence(text, max_tokens=2))
    engine.step()
    assert len(executor.started) == 1
    while not engine.idle:
        engine.step()
    assert [len(s.prompt) for s in executor.started] == [2, 13, 2]


def test_who_would_repeat_running_work_waits_and_lets_others_by() -> None:
    executor = Speller()
    engine = scheduler(executor)
    for text in ["ab", "ab", "cd"]:
        engine.add(sequence(text, max_tokens=2))
    engine.step()
    assert [chr(s.prompt[0]) for s in executor.started] == ["a", "c"]
    engine.step()
    engine.step()
    assert [chr(s.prompt[0]) for s in executor.started] == ["a", "c", "a"]


def test_abort_keeps_what_there_is_and_frees_the_rest() -> None:
    executor = Speller()
    engine = scheduler(executor, max_batch=1)
    running, waiting = sequence("ab"), sequence("cd")
    engine.add(running)
    engine.add(waiting)
    engine.step()
    assert engine.abort({"id-nobody"}) == []
    assert engine.abort({"id-ab"}) == [running]
    assert (running.finish_reason, running.text, executor.held) == ("abort", "a", set())
    assert engine.abort() == [waiting]
    assert (waiting.finish_reason, waiting.text, engine.idle) == ("abort", "", True)
    assert engine.finished["abort"] == 2


def test_each_token_is_of_the_version_that_sampled_it() -> None:
    engine = scheduler(Speller())
    one = sequence("abc", max_tokens=6)
    engine.add(one)
    for version in ["default", "default", "step-1", "step-1", "step-1", "step-2"]:
        engine.version = version
        engine.step()
    assert one.spans == [Span("default", 0, 2), Span("step-1", 2, 5), Span("step-2", 5, 6)]


def test_no_output_wanted_is_no_output() -> None:
    class Scorer(Speller):
        def advance(self, running: Iterable[Sequence]) -> list[tuple[Sequence, TokenChoice | None]]:
            return [(s, None) for s in running]

    engine = scheduler(Scorer())
    one = sequence("abc", max_tokens=0)
    engine.add(one)
    engine.step()
    assert (one.finish_reason, one.output, one.text) == ("length", [], "")
