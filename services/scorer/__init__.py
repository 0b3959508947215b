"""Rollout -> Scored: whole groups, by the environment's own rubric, in worker processes."""
