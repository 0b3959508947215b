"""Prompt -> Rollout: one request per sample (and turn) to an inference server."""
