"""Which weights a run's policy has: what its trainer announced, and where it is live (pure).

A label names one version's weights on a server: `12`, or `12@1` after the trainer went back once,
so that the weights of an abandoned future are never taken for those that came instead.
"""

from __future__ import annotations

from rollstream.shared.control import PolicyLive, PolicyVersion

FIRST_LABEL = "default"
"""What vLLM calls the weights that it was started with."""
LOADING = "loading"
"""The label of a server whose weights are being replaced: of no version at all."""


def label_of(version: int, epoch: int) -> str:
    """The label of a version in the trainer's so-many-th epoch."""
    return f"{version}@{epoch}" if epoch else str(version)


def version_of(label: str) -> int | None:
    """The version that a server's label names, 0 for what it was started with; None for others."""
    version = label.partition("@")[0]
    if label == FIRST_LABEL:
        return 0
    return int(version) if version.isdecimal() else None


class Policy:
    """A fold of the control topic."""

    def __init__(self) -> None:
        self.version = 0
        self.epoch = 0
        self.weights = ""
        """Where the newest version's weights lie, as the trainer says."""
        self.announced = False
        self.live: dict[str, str] = {}
        """By endpoint URL, the label that it has confirmed."""
        self._weights: dict[str, str] = {}

    def apply(self, record: object) -> bool:
        """Take the next record in; whether the newest version is another now."""
        if isinstance(record, PolicyLive):
            self.live[record.url] = record.label
        if not isinstance(record, PolicyVersion) or record.implied:
            return False
        before = self.label
        self.version, self.epoch = record.version, max(self.epoch, record.epoch)
        self.weights, self.announced = record.weights, True
        self._weights[self.label] = record.weights
        return self.label != before

    @property
    def label(self) -> str:
        """What a server must have to be asked; empty as long as nothing was announced."""
        return label_of(self.version, self.epoch) if self.announced else ""

    def next_epoch(self, version: int) -> int:
        """The epoch of this version if it is announced next: a lower one begins a new epoch."""
        return self.epoch + (self.announced and version < self.version)

    def next_label(self, version: int) -> str:
        """The label that this version gets if it is announced next."""
        return label_of(version, self.next_epoch(version))

    def needed(self) -> list[str]:
        """Weights that may still be loaded or used: the newest, and what is live anywhere."""
        labels = {self.label, *self.live.values()}
        return sorted({self._weights[label] for label in labels if self._weights.get(label)})
