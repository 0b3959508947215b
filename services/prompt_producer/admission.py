"""How many groups may be admitted now, and whether the run is over: pure functions.

In samples (`delivery.md` rule 22), and never more than the run's target still needs:

    min(max_in_flight - running, (max_staleness + 1) x batch - outstanding [rl])

where running = issued - distinct samples generated (at most what is outstanding), and
outstanding = issued - delivered - dropped - parked, at the leaf that is furthest behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rollstream.shared.ledger import LeafBooks
from rollstream.shared.runs import RunConfig


class Standing(NamedTuple):
    """What the books say that matters for admission."""

    issued: int
    """Groups."""
    outstanding_samples: int
    running_samples: int
    in_flight: int
    delivered: int
    """At the leaf with the fewest."""


def standing(books: Sequence[LeafBooks], generated_samples: int = 0) -> Standing:
    """The books of all leaves as one, and how many of the issued samples are generated."""
    outstanding = max(b.in_flight_samples for b in books)
    issued = max(b.issued_samples for b in books)
    return Standing(
        issued=max(b.issued for b in books),
        outstanding_samples=outstanding,
        running_samples=min(outstanding, issued - generated_samples),
        in_flight=max(b.in_flight for b in books),
        delivered=min(b.delivered for b in books),
    )


def target_groups(run: RunConfig) -> int | None:
    """How many delivered groups end the run, None where none do."""
    if run.pipeline == "rl" and run.total_steps is not None:
        return run.total_steps * run.batch_size // run.group_size
    return None if run.pipeline == "eval" else run.total_groups


def room(run: RunConfig, now: Standing, rows_end: int | None) -> int:
    """How many groups may be admitted now."""
    samples = run.max_in_flight - now.running_samples
    if run.pipeline == "rl":
        samples = min(
            samples, (run.max_staleness + 1) * run.batch_size - now.outstanding_samples
        )
    groups = max(0, samples // run.group_size)
    if (target := target_groups(run)) is not None:
        groups = min(groups, target - now.delivered - now.in_flight)
    if rows_end is not None:
        groups = min(groups, rows_end - now.issued)
    return max(0, groups)


def over(run: RunConfig, now: Standing, rows_end: int | None, *, stopped: bool) -> str | None:
    """Why the run is over, or None while it is not."""
    if now.in_flight > 0:
        return None
    if stopped:
        return "stopped"
    target = target_groups(run)
    if target is not None and now.delivered >= target:
        return "target reached"
    if rows_end is not None and now.issued >= rows_end:
        return "all rows done"
    return None
