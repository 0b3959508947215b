"""Rows of environments and datasets -> Prompt: the source of a run."""
