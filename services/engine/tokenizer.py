"""Text to tokens and back, and chat messages to a prompt, exactly as the model was trained."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Bpe

_CONTROL_TOKEN = 3  # llama.cpp's token_type of special tokens


class TemplateError(ValueError):
    """The chat template refuses these messages."""


def bpe_from_gguf(*, tokens: list[str], kinds: list[int], merges: list[str], pre: str) -> Bpe:
    """The byte-level BPE tokenizer of a GGUF file's metadata. Raises ValueError."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if pre != "smollm":
        raise ValueError(f"the pre-tokenizer {pre!r} of the GGUF file isn't known, only 'smollm'")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == _CONTROL_TOKEN
    ]
    bpe.add_special_tokens(special)
    return bpe


class Tokenizer:
    """The tokenizer and chat template of a converted model's folder."""

    def __init__(self, folder: Path, *, bos_token: int, eos_token: int) -> None:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from tokenizers import Tokenizer as Bpe

        self._bpe = Bpe.from_file(str(folder / "tokenizer.json"))
        self._token_texts: dict[int, str] = {}
        source = (folder / "chat_template.jinja").read_text()
        self.template_knows_tools = "tools" in source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        environment.filters["tojson"] = _to_json
        self._template = environment.from_string(source)
        self._template_tokens = {
            "bos_token": self._bpe.id_to_token(bos_token),
            "eos_token": self._bpe.id_to_token(eos_token),
        }

    @property
    def size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self._bpe.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens written out in it become themselves."""
        return self._bpe.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int], *, skip_special: bool = False) -> str:
        """The text of token ids."""
        return self._bpe.decode(ids, skip_special_tokens=skip_special)

    def token_name(self, token: int) -> str:
        """The vocabulary's own spelling (`Ġthere`)."""
        return self._bpe.id_to_token(token) or ""

    def token_text(self, token: int) -> str:
        """The text of one token alone; U+FFFD where it is part of a character."""
        text = self._token_texts.get(token)
        if text is None:
            text = self._token_texts[token] = self._bpe.decode([token], skip_special_tokens=False)
        return text

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt's text for chat messages whose contents are plain text.

        Raises TemplateError with the template's own words.
        """
        from jinja2.exceptions import TemplateError as JinjaError

        try:
            return self._template.render(
                **(self._template_tokens | variables),
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt,
            )
        except (JinjaError, TypeError) as error:
            raise TemplateError(str(error)) from error


def _raise(message: str) -> None:
    from jinja2.exceptions import TemplateError as JinjaError

    raise JinjaError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
