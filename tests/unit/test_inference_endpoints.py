"""Which server gets the next request, and what an endpoint's settings may say."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.shared.inference.endpoints import (
    FAULTS_TO_OPEN,
    PAUSE_S,
    SLACK,
    Endpoint,
    Pool,
    normalise,
)

A, B, C = "http://a", "http://b", "http://c"


def broken(pool: Pool, url: str, others: list[str], now: float = 0.0) -> None:
    for _ in range(FAULTS_TO_OPEN):
        assert pool.pick("", now, avoid=others) == url
        pool.finish(url, "fault", now)


@pytest.mark.parametrize(("given", "expected"), [
    ("localhost:9001/v1", "http://localhost:9001"),
    ("http://h:1/v1/", "http://h:1"),
    ("https://host/api/v1", "https://host/api"),
    (" http://h ", "http://h"),
    ("http://[::1]:8000/v1", "http://[::1]:8000"),
])
def test_urls_with_and_without_v1_are_one(given: str, expected: str):
    assert normalise(given) == expected


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:port", "http://h/v1?key=1", ""])
def test_what_is_no_base_url_is_refused(url: str):
    with pytest.raises(ValueError, match=r"base URL|like http"):
        normalise(url)


def test_a_password_in_a_url_is_refused_without_repeating_it():
    with pytest.raises(ValueError, match="credentials") as refused:
        Endpoint(name="rl", url="http://user:hunter2@h/v1").urls  # noqa: B018
    assert "hunter2" not in str(refused.value)
    assert "endpoints.rl.url" in str(refused.value)


def test_an_endpoint_may_have_several_urls():
    assert Endpoint(url="h:1/v1, h:2,h:1").urls == ["http://h:1", "http://h:2"]
    assert Endpoint(url=["h:1", "h:2"]).urls == ["http://h:1", "http://h:2"]
    with pytest.raises(ValueError, match=r"endpoints.x.url is empty"):
        Endpoint(name="x", url=" , ").urls  # noqa: B018


def test_the_key_is_read_where_it_is_named_and_never_held(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("KEY", " secret\n")
    (tmp_path / "key").write_text("from-file\n")
    by_env = Endpoint(name="e", url=A, api_key_env="KEY")
    assert by_env.api_key() == "secret"
    assert "secret" not in repr(by_env) + msgspec.json.encode(by_env).decode()
    assert Endpoint(url=A, api_key_file=str(tmp_path / "key")).api_key() == "from-file"
    assert Endpoint(url=A).api_key() is None
    monkeypatch.setenv("KEY", "")
    assert by_env.api_key() is None
    monkeypatch.delenv("KEY")
    with pytest.raises(ValueError, match=r"endpoints.e.api_key_env names KEY"):
        by_env.api_key()
    with pytest.raises(ValueError, match=r"endpoints.e.api_key_file .* No such file"):
        Endpoint(name="e", url=A, api_key_file=str(tmp_path / "none")).api_key()
    with pytest.raises(ValueError, match="both"):
        Endpoint(name="e", url=A, api_key_env="KEY", api_key_file="f").api_key()


def test_a_group_stays_on_one_server_until_that_is_much_busier():
    pool = Pool([A, B])
    picked = [pool.pick("group-7", 0.0) for _ in range(SLACK + 2)]
    assert len(set(picked[: SLACK + 1])) == 1
    assert picked[-1] != picked[0]


def test_groups_spread_over_servers():
    pool = Pool([A, B, C])
    counts = Counter(pool.pick(f"group-{n}", 0.0) for n in range(300))
    assert set(counts) == {A, B, C}
    assert max(counts.values()) - min(counts.values()) <= SLACK + 1


def test_without_a_key_the_least_loaded_is_next():
    pool = Pool([A, B])
    assert {pool.pick("", 0.0), pool.pick("", 0.0)} == {A, B}


def test_what_was_tried_is_avoided_while_there_is_another():
    pool = Pool([A, B])
    assert pool.pick("", 0.0, avoid=[A]) == B
    assert pool.pick("", 0.0, avoid=[A, B]) is not None
    assert pool.has_untried([A], 0.0)
    assert not pool.has_untried([A, B], 0.0)


def test_a_broken_server_gets_one_request_a_pause_until_one_succeeds():
    pool = Pool([A])
    broken(pool, A, [])
    assert pool.pick("", PAUSE_S - 0.1) is None
    assert pool.next_chance() == PAUSE_S
    assert not pool.has_untried([], 0.0)
    assert pool.pick("", PAUSE_S) == A
    assert pool.pick("", PAUSE_S) is None  # the trial is under way
    assert pool.pick("", 2 * PAUSE_S) == A  # a long one doesn't block for ever
    pool.finish(A, "ok", 2 * PAUSE_S)
    assert pool.pick("", 2 * PAUSE_S) == A
    assert pool.pick("", 2 * PAUSE_S) == A


def test_a_failed_trial_pauses_again():
    pool = Pool([A])
    broken(pool, A, [])
    assert pool.pick("", PAUSE_S) == A
    pool.finish(A, "fault", PAUSE_S + 1)
    assert pool.next_chance() == 2 * PAUSE_S + 1


def test_a_broken_server_is_left_out_but_comes_back_also_while_others_work():
    pool = Pool([A, B])
    broken(pool, A, [B])
    assert {pool.pick(f"g{n}", 0.0) for n in range(20)} == {B}
    assert [pool.pick(f"g{n}", PAUSE_S) for n in range(20)].count(A) == 1
    pool.finish(A, "ok", PAUSE_S)
    assert [pool.pick(f"g{n}", PAUSE_S) for n in range(20)].count(A) > 1


def test_faults_must_be_consecutive_and_a_caller_that_gave_up_says_nothing():
    pool = Pool([A])
    for outcome in ("fault", "fault", "ok", "fault", "fault", "unknown"):
        assert pool.pick("", 0.0) == A
        pool.finish(A, outcome, 0.0)  # type: ignore[arg-type]
    assert pool.pick("", 0.0) == A


events = st.sampled_from(["pick", "ok", "fault", "unknown"])


@given(st.lists(st.tuples(events, st.text(max_size=2))))
def test_in_flight_is_what_was_picked_and_not_finished(events: list[tuple[str, str]]):
    pool = Pool([A, B])
    under_way: list[str] = []
    for now, (event, key) in enumerate(events):
        if event == "pick":
            url = pool.pick(key, float(now))
            under_way += [url] if url else []
        elif under_way:
            pool.finish(under_way.pop(), event, float(now))  # type: ignore[arg-type]
        assert pool.in_flight() == {A: under_way.count(A), B: under_way.count(B)}
