"""Brokers that `rollstream up` and the tests start themselves, and how to reach any broker."""

from __future__ import annotations

from pathlib import Path

from rollstream.shared.brokers.broker import Broker, BrokerError, BrokerKind

__all__ = ["Broker", "BrokerError", "BrokerKind", "start"]


def start(kind: BrokerKind, folder: Path) -> Broker:
    """Start a broker of this kind with its log, and its data where it keeps some, in `folder`.

    Blocks until it serves. Raises ConfigError for what is missing, BrokerError where it fails.
    """
    if kind == "kafka":
        from rollstream.shared.brokers import kafka

        return kafka.start(folder)
    from rollstream.shared.brokers import embedded

    return embedded.start(folder / "broker.log")
