"""`from rollstream.client import TrainerClient`: what a trainer imports."""

from rollstream.shared.client import Batch, Group, TrainerClient, TrainerError, Trajectory

__all__ = ["Batch", "Group", "TrainerClient", "TrainerError", "Trajectory"]
