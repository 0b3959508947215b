"""tool_addition: add three numbers with an `add` tool that takes two: several turns.

Args: num_train, num_eval, seed, max_turns. Reward: the last number of the final answer is the sum,
plus a tenth for having used the tool.
"""

import random
import re

import verifiers as vf
from datasets import Dataset


def load_environment(
    num_train: int = 1000, num_eval: int = 100, seed: int = 0, max_turns: int = 5
) -> vf.Environment:
    rng = random.Random(seed)
    numbers = [tuple(rng.sample(range(10, 1000), 3)) for _ in range(num_train + num_eval)]
    parser = vf.Parser(extract_fn=last_number)
    return vf.ToolEnv(
        tools=[add],
        max_turns=max_turns,
        dataset=lambda: as_dataset(numbers[:num_train]),
        eval_dataset=lambda: as_dataset(numbers[num_train:]),
        system_prompt="Use the add tool for every addition, then answer with the sum.",
        parser=parser,
        rubric=vf.Rubric(funcs=[correct_answer, used_tool], weights=[1.0, 0.1], parser=parser),
    )


def add(a: int, b: int) -> int:
    """Add two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def last_number(text: str) -> str:
    """The last whole number in the text, or nothing."""
    return next(iter(re.findall(r"\d+", text)[::-1]), "")


def as_dataset(numbers: list[tuple[int, ...]]) -> Dataset:
    return Dataset.from_list([
        {"question": f"What is {a} + {b} + {c}?", "answer": str(a + b + c)} for a, b, c in numbers
    ])


def correct_answer(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
    return float(parser.parse_answer(completion) == answer)


def used_tool(completion: vf.Messages) -> float:
    return float(any(message.role == "tool" for message in completion))
