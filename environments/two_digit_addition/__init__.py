"""two_digit_addition: "What is 23 + 18?" -> "23 + 18 = 41", with four example turns.

A 135M model is right about half the time at temperature 1, so groups of 8 have reward variance.
Args: num_train, num_eval, seed. Reward: the last number of the answer is the sum.
"""

import random
import re

import verifiers as vf
from datasets import Dataset

OPERANDS = range(10, 50)
EXAMPLES = [(12, 25), (31, 17), (48, 26), (20, 19)]


def load_environment(num_train: int = 1000, num_eval: int = 100, seed: int = 0) -> vf.Environment:
    """Train and eval rows are disjoint, and neither holds an example's pair."""
    pairs = [(a, b) for a in OPERANDS for b in OPERANDS if (a, b) not in EXAMPLES]
    if num_train < 1 or num_eval < 1 or num_train + num_eval > len(pairs):
        raise ValueError(
            f"num_train {num_train} and num_eval {num_eval} must each be 1 or more and together "
            f"at most {len(pairs)}, the number of different pairs"
        )
    random.Random(seed).shuffle(pairs)
    parser = vf.Parser(extract_fn=last_number)
    return vf.SingleTurnEnv(
        dataset=lambda: as_dataset(pairs[:num_train]),
        eval_dataset=lambda: as_dataset(pairs[num_train : num_train + num_eval]),
        system_prompt="Answer with the equation.",
        few_shot=few_shot(),
        parser=parser,
        rubric=vf.Rubric(
            funcs=[correct_answer, restates_question], weights=[1.0, 0.0], parser=parser
        ),
    )


def last_number(text: str) -> str:
    """The last whole number in the text, or nothing."""
    return next(iter(re.findall(r"\d+", text)[::-1]), "")


def as_dataset(pairs: list[tuple[int, int]]) -> Dataset:
    return Dataset.from_list([
        {"question": question(a, b), "answer": str(a + b), "equation": f"{a} + {b} ="}
        for a, b in pairs
    ])


def few_shot() -> list:
    return [
        message
        for a, b in EXAMPLES
        for message in (
            {"role": "user", "content": question(a, b)},
            {"role": "assistant", "content": f"{a} + {b} = {a + b}"},
        )
    ]


def question(a: int, b: int) -> str:
    return f"What is {a} + {b}?"


def correct_answer(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
    return float(parser.parse_answer(completion) == answer)


def restates_question(completion: vf.Messages, equation: str) -> float:
    return float(equation in str(completion[-1].content))
