"""Scored -> Distilled: the teacher's top-k logprobs for every position of every sequence."""
