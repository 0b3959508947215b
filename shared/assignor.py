"""Which member of a consumer group reads which partition: rendezvous hashing, bounded.

Adding or removing a member moves as few partitions as possible, without any state (aiokafka's own
sticky assignor is unsafe: aiokafka issues 1126, 1175, 1176). At most ceil(P / members) partitions
a member: unbounded, one member of four idles in most draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

from aiokafka.cluster import ClusterMetadata
from aiokafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from aiokafka.coordinator.protocol import (
    ConsumerProtocolMemberAssignment,
    ConsumerProtocolMemberMetadata,
)


def place(partitions: Sequence[int], members: Sequence[str]) -> dict[int, str]:
    """Each partition's member: the highest hash that still has room.

    `members` are names that are unique and last as long as their process.
    """
    room = dict.fromkeys(members, math.ceil(len(partitions) / len(members)))
    placed: dict[int, str] = {}
    for partition in partitions:
        ranked = sorted(members, key=lambda name: _weight(name, partition), reverse=True)
        chosen = next(name for name in ranked if room[name])
        room[chosen] -= 1
        placed[partition] = chosen
    return placed


def _weight(member: str, partition: int) -> bytes:
    return blake2b(f"{member}/{partition}".encode(), digest_size=8).digest()


def assignor_for(client_id: str) -> type[AbstractPartitionAssignor]:
    """aiokafka's face of `place` for one process.

    The client id travels as the member's user data: the member id that a broker makes is new at
    every join and would move partitions for nothing.
    """

    class RendezvousAssignor(AbstractPartitionAssignor):
        name = "rollstream-rendezvous"  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

        @classmethod
        def assign(
            cls, cluster: ClusterMetadata, members: Mapping[str, ConsumerProtocolMemberMetadata]
        ) -> dict[str, ConsumerProtocolMemberAssignment]:
            given: dict[str, dict[str, list[int]]] = {member: {} for member in members}
            topics = {topic for data in members.values() for topic in data.subscription}
            for topic in sorted(topics):
                partitions = sorted(cluster.partitions_for_topic(topic) or ())
                readers = {
                    (data.user_data or member.encode()).decode(): member
                    for member, data in members.items()
                    if topic in data.subscription
                }
                for partition, reader in place(partitions, sorted(readers)).items():
                    given[readers[reader]].setdefault(topic, []).append(partition)
            return {
                member: ConsumerProtocolMemberAssignment(0, sorted(topics.items()), b"")
                for member, topics in given.items()
            }

        @classmethod
        def metadata(cls, topics: Iterable[str]) -> ConsumerProtocolMemberMetadata:
            return ConsumerProtocolMemberMetadata(0, list(topics), client_id.encode())

        @classmethod
        def on_assignment(cls, assignment: ConsumerProtocolMemberAssignment) -> None:
            """Nothing to remember: the placement is a pure function of the members."""

    return RendezvousAssignor
