"""Silence counts only while there is work; honest deadlines never fire."""

from __future__ import annotations

import pytest
from making import run

from rollstream.shared.runs import Deadlines
from rollstream.shared.watchdog import Level, Rejoins, Watchdog, limit_s


def test_silence_with_work_grows_from_a_warning_to_the_end():
    dog = Watchdog()
    levels = [
        dog.look("a", done=4, busy=True, limit_s=10, now_s=now).level for now in (0, 9, 10, 20, 30)
    ]
    assert levels == [Level.FINE, Level.FINE, Level.WARNING, Level.UNHEALTHY, Level.OVER]
    assert dog.look("a", done=4, busy=True, limit_s=10, now_s=999).level is Level.OVER


def test_anything_done_starts_it_anew():
    dog = Watchdog()
    dog.look("a", done=4, busy=True, limit_s=10, now_s=0)
    assert dog.look("a", done=5, busy=True, limit_s=10, now_s=19).silent_s == 0
    assert dog.look("a", done=5, busy=True, limit_s=10, now_s=28).level is Level.FINE


def test_without_work_silence_is_fine_for_ever():
    """A member without a partition, or one that stands by, is healthy."""
    dog = Watchdog()
    for now in range(0, 10_000, 100):
        assert dog.look("a", done=0, busy=False, limit_s=10, now_s=now).level is Level.FINE
    assert dog.look("a", done=0, busy=True, limit_s=10, now_s=10_005).level is Level.FINE


def test_stages_are_watched_each_by_itself_and_forgotten():
    dog = Watchdog()
    for key in ("a", "b"):
        dog.look(key, done=0, busy=True, limit_s=10, now_s=0)
    dog.look("b", done=1, busy=True, limit_s=10, now_s=30)
    assert dog.look("a", done=0, busy=True, limit_s=10, now_s=30).level is Level.OVER
    dog.forget("a")
    assert dog.look("a", done=0, busy=True, limit_s=10, now_s=31).level is Level.FINE


@pytest.mark.parametrize(("service", "least_s"), [
    ("generator", 5000), ("scorer", 400), ("teacher-distiller", 700), ("sink", 1),
    ("prompt-producer", 1), ("reward-model", 5000),
])
def test_no_limit_is_below_what_the_deadlines_allow(service: str, least_s: float):
    config = run(deadlines=Deadlines(sample_s=5000, scoring_s=100, teacher_s=700), max_attempts=3)
    assert limit_s(service, config) > least_s


def test_a_burst_of_rejoins_is_fine_and_a_steady_stream_is_not():
    burst = Rejoins()
    for at in range(60):
        burst.joined("g", at)
    assert all(burst.too_often(now) is None for now in range(60, 300))
    steady = Rejoins()
    told = []
    for at in range(0, 190, 9):
        steady.joined("g", at)
        told.append(steady.too_often(at))
    assert (told[0], told[-1]) == (None, "g")
    slow = Rejoins()
    for at in range(0, 600, 12):
        slow.joined("g", at)
        assert slow.too_often(at) is None
