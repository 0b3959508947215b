"""Which dead letters can be put back, and the one record that does it."""

from __future__ import annotations

from typing import Any

import pytest
from making import run

from rollstream.shared.codec import encode
from rollstream.shared.dead_letters import (
    FAILURES_IN_A_ROW,
    FailureRun,
    TooManyFailures,
    letter_headers,
)
from rollstream.shared.ledger import Ledger
from rollstream.shared.records import (
    DeadLetter,
    Ended,
    EnvRef,
    Failure,
    Input,
    Issued,
    Outcome,
    Redriven,
    Rollout,
    Row,
    Stop,
    group_of,
)
from rollstream.shared.redrive import (
    Filter,
    Letter,
    NotRedrivable,
    State,
    group_record,
    opened_again,
    records_in,
    states,
)
from rollstream.shared.routes import Route, builtin, leaves_after, stages
from rollstream.shared.runs import Status

FAILURE = Failure("ZeroDivisionError", "x" * 5000)


def letter(n: int = 0, **fields: Any) -> DeadLetter:
    return DeadLetter(**{
        "run": "r", "pipeline": "rl", "stage": "scorer", "n": n, "topic": "t", "partition": 0,
        "offset": 5, "error": FAILURE, **fields,
    })


def rollout(i: int) -> Rollout:
    return Rollout(run="r", pipeline="rl", n=0, i=i, k=2, env=EnvRef("e"), stop=Stop.STOP,
                   row=Row(prompt=[{"role": "user", "content": "?"}]))


def inputs(*records: Any) -> list[Input]:
    return [Input(at, *encode(record)) for at, record in enumerate(records)]


def books(*records: Any) -> Ledger:
    made = Ledger(["trainer"], 1)
    for record in (Issued(n=0, k=2), Issued(n=1, k=2), *records):
        made.apply(0, record)
    return made


def state(letters: list[DeadLetter], *records: Any) -> list[State]:
    located = [Letter(0, at, one) for at, one in enumerate(letters)]
    return [found for _, found in states(located, books(*records), run(partitions=1).stages)]


PARKED = Ended(n=0, leaf="trainer", outcome=Outcome.PARKED)


def test_what_the_ledger_says_decides():
    assert state([letter()], PARKED) == [State.PARKED]
    # The sink has not read the parked record, or it never was written: its stage died before.
    assert state([letter()]) == [State.IN_FLIGHT]
    assert state([letter()], PARKED, Redriven(n=0)) == [State.REDRIVEN]
    assert state([letter()], PARKED, Redriven(n=0), Ended(
        n=0, leaf="trainer", outcome=Outcome.DELIVERED)) == [State.ENDED]
    again = [letter(), letter(redrives=1)]
    assert state(again, PARKED, Redriven(n=0)) == [State.SUPERSEDED, State.IN_FLIGHT]
    parked_again = Ended(n=0, leaf="trainer", outcome=Outcome.PARKED, redrives=1)
    assert state(again, PARKED, Redriven(n=0), parked_again) == [State.SUPERSEDED, State.PARKED]


def test_a_group_parked_further_down_is_put_back_there():
    """The first stage's letter is of an earlier try: its own work is done."""
    further_down = letter(stage="teacher-distiller", redrives=1)
    parked_again = Ended(n=0, leaf="trainer", outcome=Outcome.PARKED, redrives=1)
    located = [Letter(0, at, one) for at, one in enumerate([letter(), further_down])]
    rows = stages(builtin(), "rl", teacher=True)
    ledger = books(PARKED, Redriven(n=0), parked_again)
    assert [found for _, found in states(located, ledger, rows)] == [State.REDRIVEN, State.PARKED]


def test_evidence_is_what_never_was_a_group_and_hides_no_letter():
    bad = Failure("undecodable", "?")
    sample = letter(error=bad, inputs=inputs(rollout(0)))
    assert state([letter(), sample, letter(n=-1)], PARKED) == [
        State.PARKED, State.EVIDENCE, State.EVIDENCE
    ]
    group = letter(error=bad, inputs=inputs(group_of([rollout(0), rollout(1)])))
    assert state([group], PARKED) == [State.PARKED]


def test_a_sample_that_can_not_be_read_stays_the_error_that_it_was():
    (_, headers) = encode(rollout(0))
    torn = [Input(0, b"{", headers), *inputs(rollout(1))]
    group = group_record(letter(), records_in(torn, run()))
    assert [s.error.type if s.error else None for s in group.samples] == ["undecodable", None]
    assert group.row.question == "?"


@pytest.mark.parametrize(("reason", "status"), [
    ("all rows done", Status.RUNNING), ("stopped", Status.STOPPED),
    ("stopped; redriven groups", Status.STOPPED), ("", Status.RUNNING),
])
def test_a_stopped_run_is_opened_as_stopped(reason: str, status: Status):
    assert opened_again(reason)[0] is status
    assert opened_again(opened_again(reason)[1])[0] is status


def test_rollouts_become_one_group_and_a_group_is_put_back_as_it_was():
    group = group_record(letter(), records_in(inputs(rollout(1), rollout(0)), run()))
    assert ([sample.i for sample in group.samples], group.redrives) == ([0, 1], 1)
    once = group_of([rollout(0), rollout(1)])
    once.redrives = 1
    assert group_record(letter(redrives=1), records_in(inputs(once), run())).redrives == 2


@pytest.mark.parametrize(("given", "why"), [
    ([], "no rollout"), ([Input(3, b"junk")], "at 3 can't be read"),
])
def test_what_gives_no_group_says_why(given: list[Input], why: str):
    with pytest.raises(NotRedrivable, match=why):
        group_record(letter(), records_in(given, run()))


@pytest.mark.parametrize(("chosen", "takes"), [
    (Filter(), True), (Filter(stage="scorer"), True), (Filter(stage="scorer:strict"), False),
    (Filter(error="ZeroDivisionError"), True), (Filter(error="ValueError"), False),
    (Filter(first_n=7, last_n=7), True), (Filter(first_n=8), False), (Filter(last_n=6), False),
    (Filter(since_ms=1000, until_ms=1000), True), (Filter(since_ms=1001), False),
    (Filter(until_ms=999), False),
])
def test_filters(chosen: Filter, takes: bool):
    assert chosen.takes(letter(n=7, at_ms=1000)) is takes


def test_a_letter_leads_to_the_leaves_of_its_branch():
    rows = [
        Route("p", "prompt-producer", None, "prompts"), Route("p", "generator", "prompts", "r"),
        Route("p", "scorer", "r", "a"), Route("p", "scorer:strict", "r", "b"),
        Route("p", "teacher-distiller", "b", "c"),
        Route("p", "sink:dataset", "a"), Route("p", "sink:archive", "c"),
    ]
    assert leaves_after(rows, "scorer") == ["dataset"]
    assert leaves_after(rows, "scorer:strict") == ["archive"]
    assert leaves_after(rows, "generator") == ["dataset", "archive"]
    assert leaves_after(rows, "sink:archive") == ["archive"]
    assert leaves_after(rows, "nobody") == []


def test_headers_say_what_it_is_without_the_body():
    told = dict(letter_headers(letter(inputs=[Input(5, b"", [], None, 77)], at_ms=99), "g"))
    assert told["dlq.error.type"] == b"ZeroDivisionError"
    assert len(told["dlq.error.message"]) == 1000
    assert (told["dlq.timestamp_ms"], told["dlq.at_ms"], told["dlq.group"]) == (b"77", b"99", b"g")


def test_half_of_the_last_hundred_is_too_many():
    limit = FailureRun()
    for at in range(98):
        if at % 2:
            limit.failure(FAILURE)
        else:
            limit.success()
    limit.success()
    with pytest.raises(TooManyFailures, match="50 of the last 100"):
        limit.failure(FAILURE)


def test_few_failures_among_many_go_on_for_ever():
    limit = FailureRun()
    for _ in range(50):
        for _ in range(FAILURES_IN_A_ROW - 1):
            limit.failure(FAILURE)
        for _ in range(3 * FAILURES_IN_A_ROW):
            limit.success()
