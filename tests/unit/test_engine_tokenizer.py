"""The tokenizer and chat template taken out of the GGUF file."""

from __future__ import annotations

import pytest

from rollstream.services.engine.convert import ModelNotFound, default_cache, locate, prepare
from rollstream.services.engine.tokenizer import TemplateError, Tokenizer

# As transformers gives them for the same messages.
THREE_PLUS_FOUR = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
    19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 216, 35, 1232, 216, 36, 47, 2, 198, 1, 520, 9531,
    198,
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    try:
        gguf_file = locate("smollm2")
    except ModelNotFound as error:
        pytest.skip(f"smollm2 {error}")
    return Tokenizer(prepare(gguf_file, default_cache()), bos_token=1, eos_token=2)


def test_a_chat_becomes_the_known_ids(tokenizer: Tokenizer) -> None:
    text = tokenizer.render([{"role": "user", "content": "What is 3 + 4?"}])
    assert tokenizer.encode(text) == THREE_PLUS_FOUR


def test_a_next_turn_continues_the_same_tokens(tokenizer: Tokenizer) -> None:
    asked = [{"role": "user", "content": "What is 3 + 4?"}]
    first = tokenizer.encode(tokenizer.render(asked))
    answered = [*asked, {"role": "assistant", "content": "7"}, {"role": "user", "content": "5?"}]
    assert tokenizer.encode(tokenizer.render(answered))[: len(first)] == first


@pytest.mark.parametrize(
    "text",
    [
        "hello   12", " leading", "trailing  ", "tab\tand\nline\n\n", "naïve café ÄÖÜ ß",
        "数学 日本語", "emoji 🙂👩‍🚀", "<|im_start|>user\nhi<|im_end|>", "12345 3.14", "  \n  x",
    ],
)
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_stand_alone_and_take_no_space_with_them(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hello   12")[1:] == [333, 33, 34]
    assert tokenizer.encode("hi there") == [6004, 665]
    assert [tokenizer.token_name(t) for t in [6004, 665]] == ["hi", "Ġthere"]


def test_special_tokens_are_one_token_and_can_be_left_out(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert tokenizer.decode([6004, 2]) == "hi<|im_end|>"
    assert tokenizer.decode([6004, 2], skip_special=True) == "hi"


def test_the_template_refuses_what_it_can_not_render(tokenizer: Tokenizer) -> None:
    with pytest.raises(TemplateError):
        tokenizer.render([{"role": "user"}])
