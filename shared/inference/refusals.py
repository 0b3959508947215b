"""Tells a request's own fault from an answer that every request of the run would get (pure).

401, 403 and 404 speak of the key, the model or the route: one is enough. 400 and 422 speak of the
request, which may be the sample's own doing, until there are too many in a row.
"""

from __future__ import annotations

from rollstream.shared.inference.types import ContextOverflow, InferenceError

AT_ONCE = frozenset({401, 403, 404})
IN_A_ROW = frozenset({400, 422})
MOST_IN_A_ROW = 5


class RefusesAll(InferenceError):
    """Whatever this run asks, the server says this: somebody has to look."""


class Refusals:
    """What one run's requests to one service were answered, as far as it matters here."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def accepted(self) -> None:
        """A request was answered as asked."""
        self._in_a_row = 0

    def judged(self, error: InferenceError) -> InferenceError:
        """The error, as a RefusesAll where no other request would fare better."""
        refused = error.status in IN_A_ROW and not isinstance(error, ContextOverflow)
        self._in_a_row += refused
        if error.status not in AT_ONCE and self._in_a_row < MOST_IN_A_ROW:
            return error
        more = f" ({self._in_a_row} requests in a row)" if refused else ""
        return RefusesAll(f"{error}{more}", status=error.status)
