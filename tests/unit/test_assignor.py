"""Partitions are placed evenly, and few of them move when a member comes or goes."""

import math

from hypothesis import given
from hypothesis import strategies as st

from rollstream.shared.assignor import assignor_for, place

members = st.lists(st.text("abcdef0123456789", min_size=4), min_size=1, max_size=8, unique=True)


@given(members, st.integers(1, 64))
def test_every_partition_has_one_member_and_nobody_has_too_many(names, partitions):
    placed = place(range(partitions), names)
    assert set(placed) == set(range(partitions))
    most = math.ceil(partitions / len(names))
    assert all(list(placed.values()).count(name) <= most for name in names)


@given(members, st.integers(1, 64), st.randoms())
def test_the_placement_does_not_depend_on_order(names, partitions, random):
    shuffled = list(names)
    random.shuffle(shuffled)
    assert place(range(partitions), names) == place(range(partitions), shuffled)


def test_a_fourth_member_moves_about_its_share():
    names = [f"generator-{c}" for c in "abc"]
    before = place(range(64), names)
    after = place(range(64), [*names, "generator-d"])
    moved = sum(before[p] != after[p] for p in before)
    assert 16 <= moved <= 28


class _Cluster:
    def partitions_for_topic(self, topic: str) -> set[int]:
        return set(range(12))


def test_members_are_known_by_client_id_not_by_the_brokers_member_id():
    a, b = assignor_for("client-a"), assignor_for("client-b")
    first = {"m1": a.metadata(["t"]), "m2": b.metadata(["t"])}
    rejoined = {"m9": a.metadata(["t"]), "m0": b.metadata(["t"])}
    one = a.assign(_Cluster(), first)  # type: ignore[arg-type]
    two = b.assign(_Cluster(), rejoined)  # type: ignore[arg-type]
    assert one["m1"].encode() == two["m9"].encode()
    assert one["m2"].encode() == two["m0"].encode()
