"""The limit grows while all of it is used, shrinks on faults, and holds whatever happens."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollstream.shared.inference.limits import FIRST, HOLD_S, Limit

MOST, TOKENS = 40, 1000


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.limit = Limit(MOST, TOKENS)
        self.under_way: list[int] = []
        self.now_s = 0.0

    @rule(tokens=st.integers(0, 2 * TOKENS))
    def ask(self, tokens: int) -> None:
        if self.limit.admits(tokens):
            fits = sum(self.under_way) + tokens <= TOKENS
            room = len(self.under_way) < self.limit.allowed
            assert not self.under_way or (fits and room)
            self.limit.begin(tokens)
            self.under_way.append(tokens)
        else:
            assert self.under_way, "one is always admitted"

    @rule(at=st.integers(0, 99), outcome=st.sampled_from(["ok", "ok", "ok", "fault", "unknown"]))
    def answer(self, at: int, outcome) -> None:
        if self.under_way:
            tokens = self.under_way.pop(at % len(self.under_way))
            self.limit.end(tokens, outcome, self.now_s)

    @rule()
    def queue(self) -> None:
        self.limit.queueing(self.now_s)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def it_keeps_count(self) -> None:
        assert (self.limit.requests, self.limit.tokens) == (
            len(self.under_way), sum(self.under_way)
        )
        assert 1 <= self.limit.allowed <= MOST


AnyOrder.TestCase.settings = settings(max_examples=200, deadline=None)
test_any_order = AnyOrder.TestCase


def full_round(limit: Limit, now_s: float) -> int:
    """As many answers as are allowed, while there is always more to ask; how many that were."""
    count = limit.allowed
    for _ in range(count):
        while limit.admits(10):
            limit.begin(10)
        limit.end(10, "ok", now_s)
    while limit.requests:
        limit.end(10, "unknown", now_s)
    return count


def test_it_doubles_then_halves_once_and_grows_by_quarters():
    limit = Limit(1000)
    assert [full_round(limit, 0.0) for _ in range(3)] == [FIRST, 2 * FIRST, 4 * FIRST]
    for _ in range(50):
        limit.begin(10)
    for _ in range(50):
        limit.end(10, "fault", 100.0)
    assert limit.allowed == 4 * FIRST, "128 halved, once for all that failed together"
    full_round(limit, 101.0)
    assert limit.allowed == 4 * FIRST, "what was sent before tells nothing new"
    full_round(limit, 100.0 + HOLD_S)
    assert limit.allowed == 5 * FIRST


def test_what_is_not_used_does_not_grow():
    limit = Limit(1000)
    for _ in range(100):
        limit.begin(1)
        limit.end(1, "ok", 0.0)
    assert limit.allowed == FIRST


def test_a_queue_takes_it_down_to_where_it_began_and_faults_to_one():
    limit = Limit(1000)
    full_round(limit, 0.0)
    for at in range(20):
        limit.queueing(at * HOLD_S)
    assert limit.allowed == FIRST
    for at in range(20, 40):
        limit.begin(1)
        limit.end(1, "fault", at * HOLD_S)
    assert limit.allowed == 1
