"""group_ranking: an addition whose samples are ranked against each other.

A right answer earns 1; within its group the shorter right answers earn up to 0.5 more.
Args: num_train, num_eval, seed. It shows a group reward function: all samples are scored together.
"""

import random
import re

import verifiers as vf
from datasets import Dataset


def load_environment(num_train: int = 1000, num_eval: int = 100, seed: int = 0) -> vf.Environment:
    rng = random.Random(seed)
    pairs = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(num_train + num_eval)]
    parser = vf.Parser(extract_fn=last_number)
    return vf.SingleTurnEnv(
        dataset=lambda: as_dataset(pairs[:num_train]),
        eval_dataset=lambda: as_dataset(pairs[num_train:]),
        system_prompt="Answer as shortly as you can.",
        parser=parser,
        rubric=vf.Rubric(
            funcs=[correct_answer, shorter_ranks_higher], weights=[1.0, 0.5], parser=parser
        ),
    )


def last_number(text: str) -> str:
    """The last whole number in the text, or nothing."""
    return next(iter(re.findall(r"\d+", text)[::-1]), "")


def as_dataset(pairs: list[tuple[int, int]]) -> Dataset:
    return Dataset.from_list([
        {"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs
    ])


def correct_answer(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
    return float(parser.parse_answer(completion) == answer)


def shorter_ranks_higher(
    completions: list[vf.Messages], answers: list[str], parser: vf.Parser
) -> list[float]:
    """1 for the shortest right answer of the group down to 0 for the longest; 0 where wrong."""
    lengths = [len(str(completion[-1].content)) for completion in completions]
    right = [
        parser.parse_answer(completion) == answer
        for completion, answer in zip(completions, answers, strict=True)
    ]
    field = [length for length, is_right in zip(lengths, right, strict=True) if is_right]
    return [
        sum(other > length for other in field) / max(1, len(field) - 1) if is_right else 0.0
        for length, is_right in zip(lengths, right, strict=True)
    ]
