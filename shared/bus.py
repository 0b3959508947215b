"""The one place that opens Kafka clients, so that every one of them is set up the same way.

    reader   reads without a group: taps, tails, ledgers
    member   reads as a member of a consumer group, commits by hand
    writer   writes records to a partition *number*, acks=all
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, MessageSizeTooLargeError

from rollstream.shared.assignor import assignor_for
from rollstream.shared.codec import Format, Headers, encode
from rollstream.shared.telemetry import inject
from rollstream.shared.watchdog import Rejoins

SEND_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
MAX_REQUEST_BYTES = 4 * 1024 * 1024


class Lost(Exception):
    """"Not mine any more": this attempt at the run is over, the next starts through the log."""

    @staticmethod
    def because(what: str, error: Exception) -> Lost:
        """What could not be done, and why: the type of an error that has no words (a timeout)."""
        return Lost(f"{what}: {str(error) or type(error).__name__}")


class TooLarge(Exception):
    """The record is bigger than a topic takes: sending it again would not help."""


class Bus:
    """How one process reaches the broker.

    `client_id` is unique per process: partitions are placed by it.
    """

    def __init__(
        self, bootstrap: str, client_id: str, options: dict[str, Any] | None = None,
        *, session_timeout_ms: int = 10_000, fetch_wait_ms: int = 100,
    ) -> None:
        self.bootstrap = bootstrap
        self.client_id = client_id
        self.options = dict(options or {})
        self.rejoins = Rejoins()
        self._session_timeout_ms = session_timeout_ms
        self._fetch_wait_ms = fetch_wait_ms

    def _common(self) -> dict[str, Any]:
        return {
            "bootstrap_servers": self.bootstrap, "client_id": self.client_id,
            "metadata_max_age_ms": 30_000, **self.options,
        }

    def reader(self) -> AIOKafkaConsumer:
        """A consumer without a group; assign and seek before the first read."""
        return AIOKafkaConsumer(
            group_id=None, enable_auto_commit=False, auto_offset_reset="none",
            fetch_max_wait_ms=self._fetch_wait_ms, **self._common(),
        )

    def member(self, group: str) -> AIOKafkaConsumer:
        """A member of a consumer group; `subscribe` afterwards.

        `max_poll_interval_ms` is a day: the watchdog is ours, and a member that aiokafka thinks
        idle leaves and never comes back (aiokafka issues 1187, 848, 720).
        """
        return AIOKafkaConsumer(
            group_id=group, enable_auto_commit=False, auto_offset_reset="none",
            fetch_max_wait_ms=self._fetch_wait_ms,
            session_timeout_ms=self._session_timeout_ms,
            heartbeat_interval_ms=max(300, self._session_timeout_ms // 6),
            rebalance_timeout_ms=60_000, max_poll_interval_ms=24 * 3600 * 1000,
            partition_assignment_strategy=(assignor_for(self.client_id),),
            **self._common(),
        )

    def admin(self) -> AIOKafkaAdminClient:
        return AIOKafkaAdminClient(**self._common())

    async def writer(self) -> Writer:
        """A started Writer. Raises KafkaError where the broker can't be reached."""
        producer = AIOKafkaProducer(
            acks="all", linger_ms=2, max_request_size=MAX_REQUEST_BYTES,
            request_timeout_ms=30_000, **self._common(),
        )
        await start(producer)
        return Writer(producer)


class Writer:
    """Writes records; an answer means that every replica has them."""

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self._producer = producer

    async def send(
        self, topic: str, partition: int, record: msgspec.Struct, *,
        key: str = "", format: Format = "json", headers: Headers | None = None,
    ) -> int:
        """The record's offset, once it is acknowledged.

        Raises Lost where the send failed or took too long: what became of it is not known, so the
        attempt has to start again and look (`delivery.md` rule 25). Raises TooLarge.
        """
        body, own_headers = encode(record, format)
        return await self.send_bytes(
            topic, partition, key.encode(), body, own_headers + (headers or [])
        )

    async def send_bytes(
        self, topic: str, partition: int, key: bytes, body: bytes | None,
        headers: Headers | None = None,
    ) -> int:
        """Bytes as they are. Raises Lost and TooLarge."""
        try:
            sent = await asyncio.wait_for(
                self._producer.send_and_wait(
                    topic, body, key=key, partition=partition, headers=inject(headers or [])
                ),
                SEND_TIMEOUT_S,
            )
        except MessageSizeTooLargeError as error:
            size = len(body or b"")
            raise TooLarge(f"{size} bytes are more than {topic} takes") from error
        except (KafkaError, TimeoutError) as error:
            raise Lost.because(f"could not write to {topic}", error) from error
        return sent.offset

    async def close(self) -> None:
        await stop(self._producer)


async def start(client: Any, timeout_s: float = 30.0) -> None:
    """Start an aiokafka client within a deadline; it is stopped again where that fails."""
    try:
        await asyncio.wait_for(client.start(), timeout_s)
    except BaseException:
        await stop(client)
        raise


async def stop(client: Any) -> None:
    """Stop an aiokafka client; it may hang when brokers are gone (aiokafka issues 1101, 659)."""
    method = client.close if isinstance(client, AIOKafkaAdminClient) else client.stop
    try:
        await asyncio.wait_for(method(), STOP_TIMEOUT_S)
    except (KafkaError, TimeoutError):
        pass


__all__ = ["Bus", "ConsumerRebalanceListener", "Lost", "TooLarge", "Writer", "start", "stop"]
