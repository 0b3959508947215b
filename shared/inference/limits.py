"""How much of a service's capacity one run may use at once (pure).

Requests are bounded by a number that adapts: it grows as long as all of it is used
and answered, and shrinks where the service fails or lets
requests queue. Their tokens (prompt and budget) are bounded by a fixed number.
"""

from __future__ import annotations

from rollstream.shared.inference.endpoints import Outcome

FIRST = 16
"""Where it begins; queueing alone never takes it lower: the queue may be others' doing."""
FAULT, QUEUE = 0.5, 0.8
"""What is left of it after a fault, and while requests queue at the server."""
HOLD_S = 5.0
"""After it shrank it stays for so long: what was sent before tells nothing new."""


class Limit:
    """Admits requests, and learns from how they end.

    One is always admitted: a request of more tokens than the limit goes alone.
    """

    def __init__(self, most_requests: int, most_tokens: int = 0) -> None:
        self._most_requests = most_requests
        self._most_tokens = most_tokens
        self._allowed = float(min(FIRST, most_requests))
        self._growth = 1.0
        self._held_until_s = 0.0
        self.requests = 0
        self.tokens = 0

    @property
    def allowed(self) -> int:
        """Requests that may be under way now."""
        return max(1, int(self._allowed))

    def admits(self, tokens: int) -> bool:
        """Whether a request of so many tokens may begin; 0 where nobody knows."""
        if self.requests == 0:
            return True
        fits = not self._most_tokens or self.tokens + tokens <= self._most_tokens
        return self.requests < self.allowed and fits

    def begin(self, tokens: int) -> None:
        self.requests += 1
        self.tokens += tokens

    def end(self, tokens: int, outcome: Outcome, now_s: float) -> None:
        """A request that had begun is over."""
        was_full = self.requests >= self.allowed
        self.requests -= 1
        self.tokens -= tokens
        if outcome == "fault":
            self._shrink(FAULT, 1, now_s)
        elif outcome == "ok" and was_full and now_s >= self._held_until_s:
            self._allowed = min(self._most_requests, self._allowed + self._growth)

    def queueing(self, now_s: float) -> None:
        """Requests wait at the server for room in its batch."""
        self._shrink(QUEUE, FIRST, now_s)

    def _shrink(self, factor: float, low: int, now_s: float) -> None:
        if now_s < self._held_until_s:
            return
        self._growth = 0.25
        self._allowed = max(min(low, self._allowed), self._allowed * factor)
        self._held_until_s = now_s + HOLD_S
