"""A rubric that answers at random, and that a file beside it breaks: for tests.

One number is drawn for each scoring of a group and given to all its samples: a group whose samples
differ was mixed from two scorings. While the file `broken` lies beside this module every scoring
raises; a file `poison` names answers whose groups raise.
"""

import random
from pathlib import Path

import verifiers as vf
from datasets import Dataset

FOLDER = Path(__file__).parent


def load_environment(rows: int = 6) -> vf.Environment:
    items = [{"question": f"Say {n}.", "answer": str(n)} for n in range(rows)]
    rubric = vf.Rubric(funcs=[judge], weights=[1.0])
    return vf.SingleTurnEnv(dataset=lambda: Dataset.from_list(items), rubric=rubric)


def judge(completions: list[vf.Messages], answers: list[str]) -> list[float]:
    if (FOLDER / "broken").exists():
        raise ZeroDivisionError("the rubric is broken")
    poison = FOLDER / "poison"
    if poison.exists() and answers[0] in poison.read_text().split():
        raise ValueError(f"no verdict on {answers[0]}")
    return [1 + random.random()] * len(completions)
