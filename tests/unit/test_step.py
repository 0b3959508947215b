"""The forms of a step: retries, deadlines, batching in order."""

import asyncio

import pytest

from rollstream.shared.records import Failure, Redriven
from rollstream.shared.step import Batcher, Blocked, Step, perform


async def echo(n: int) -> Redriven:
    return Redriven(n=n)


def test_a_step_has_exactly_one_form():
    with pytest.raises(ValueError, match="exactly one"):
        Step()
    with pytest.raises(ValueError, match="exactly one"):
        Step(each=echo, group=echo)


async def test_a_fault_is_tried_again_and_reported_in_the_end():
    calls = 0

    async def fails_twice(n: int) -> Redriven:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise KeyError("x")
        return Redriven(n=n)

    step = Step(each=fails_twice, max_attempts=3, retry_pause_s=0)
    assert await perform(fails_twice, 1, step) == Redriven(n=1)
    calls = 0
    step = Step(each=fails_twice, max_attempts=2, retry_pause_s=0)
    assert await perform(fails_twice, 1, step) == Failure("KeyError", "'x'")


async def test_a_deadline_is_a_failure_and_blocked_is_not():
    async def hangs(n: int) -> Redriven:
        await asyncio.sleep(60)
        return Redriven(n=n)

    async def blocked(n: int) -> Redriven:
        raise Blocked("401")

    step = Step(each=hangs, max_attempts=1, deadline_s=0.01)
    failure = await perform(hangs, 1, step)
    assert isinstance(failure, Failure)
    assert failure.type == "timeout"
    with pytest.raises(Blocked):
        await perform(blocked, 1, Step(each=blocked))


async def test_a_batch_answers_each_call_in_its_place():
    sizes = []

    async def double(records: list[int]) -> list[Redriven]:
        sizes.append(len(records))
        return [Redriven(n=2 * n) for n in records]

    call = Batcher(Step(batch=double, max_batch=4, max_wait_ms=5))
    answers = await asyncio.gather(*(call(n) for n in range(10)))
    assert [a.n for a in answers if isinstance(a, Redriven)] == [2 * n for n in range(10)]
    assert sizes == [4, 4, 2]


async def test_a_batch_of_the_wrong_length_fails_every_call():
    async def loses(records: list[int]) -> list[Redriven]:
        return [Redriven(n=0)]

    call = Batcher(Step(batch=loses, max_batch=2, max_wait_ms=5))
    answers = await asyncio.gather(call(1), call(2), return_exceptions=True)
    assert all(isinstance(answer, ValueError) for answer in answers)
