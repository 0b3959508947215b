"""Read-only eyes: everything here reads without a consumer group and never disturbs a run."""
