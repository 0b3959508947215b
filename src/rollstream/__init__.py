"""Rollstream: LLM post-training rollouts as a durable stream over Kafka topics."""

__version__ = "0.1.0"
