"""For trainers: batches of a run over HTTP, as numpy arrays. Needs nothing but numpy."""

from rollstream.shared.client.trainer import (
    Batch,
    Group,
    TrainerClient,
    TrainerError,
    Trajectory,
)

__all__ = ["Batch", "Group", "TrainerClient", "TrainerError", "Trajectory"]
