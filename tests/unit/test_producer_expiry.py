"""An unended group is told of when half of the shortest retention is over, and not before."""

from rollstream.services.prompt_producer.expiry import Expiring, expiring, oldest
from rollstream.shared.ledger import Ledger
from rollstream.shared.records import Ended, Issued, Outcome

LEAVES = ["trainer", "archive"]


def books() -> Ledger:
    made = Ledger(LEAVES, 1)
    for n, at_s in enumerate((100.0, 120.0, 180.0)):
        made.apply(0, Issued(n=n, k=4), at_s)
    made.apply(0, Ended(n=0, leaf="trainer", outcome=Outcome.DELIVERED), 130.0)
    return made


def test_a_group_counts_until_every_leaf_has_ended_it():
    made = books()
    assert oldest(made, LEAVES, 200.0) == (0, 100.0)
    assert oldest(made, ["trainer"], 200.0) == (1, 80.0)
    made.apply(0, Ended(n=0, leaf="archive", outcome=Outcome.DROPPED, reason="x"), 140.0)
    assert oldest(made, LEAVES, 200.0) == (1, 80.0)
    assert oldest(Ledger(LEAVES, 1), LEAVES, 200.0) is None


def test_half_of_the_retention_is_the_limit():
    assert expiring(books(), LEAVES, 200.0, 199.0) is None
    assert expiring(books(), LEAVES, 200.0, 200.0) == Expiring(1, 0, 100.0, 100.0)
    assert expiring(books(), LEAVES, 200.0, 220.0) == Expiring(2, 0, 120.0, 80.0)
    assert expiring(books(), LEAVES, 100.0, 220.0) == Expiring(2, 0, 120.0, -20.0)
    assert expiring(books(), LEAVES, None, 1e9) is None
