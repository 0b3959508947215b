"""Whether two servers' tokenizers are the same: what they make of many kinds of text (pure).

Names and sizes of vocabularies say little: the ids that come out of the tokenizers themselves do.
The probes hold scripts, spaces, digits, code, special tokens in text, and bytes that merge oddly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

TOKENIZER = "tokenizer"
"""The name of the fact by which a stage tells its server's fingerprint."""
PROBES: tuple[str, ...] = (
    "The quick brown fox jumps over the lazy dog.", "hello   12", "  leading and trailing  ",
    "\t\tif x == 1:\n\t\t\treturn None\n", "line\r\nends\n\n\n\nhere",
    "1234567890 3.14159 1,000,000",
    "it's we'll I'd they've CAN'T", "naïve café über Straße", "\u0041\u030a \u00c5 ﬁ ½ ①",
    "Привет, мир! Ще не вмерла", "Καλημέρα κόσμε", "שלום עולם", "السلام عليكم", "नमस्ते दुनिया",
    "สวัสดีชาวโลก", "你好，世界。人工智能", "こんにちは世界 カタカナ", "안녕하세요 세계",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 🇩🇪", "\u200b\u00a0\ufeff|",
    "<|im_start|>user\n<|im_end|>", "<|endoftext|></s><s>[INST]", "<|eot_id|><|start_header_id|>",
    "<think>\nhm\n</think>", "<tool_call>{\"name\": \"f\"}</tool_call>", "<pad><unk><bos><eos>",
    "def f(xs):\n    return [x ** 2 for x in xs if x % 2]", "SELECT * FROM t WHERE a >= 'b';",
    "https://example.org/a_b?c=%20&d#e", "{\"a\": [1, 2.5e-10, null, true]}",
    "$\\frac{a}{b} \\leq x^2$",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "antidisestablishmentarianism", "----====____####****",
    "∑∫√∞≈≠≤≥ αβγ ℝ", "a\u0000b\u0001c\u007f", "¡Hola! ¿Qué tal? Ñandú", "İstanbul ıǰ ß ẞ",
)


def fingerprint(ids: Sequence[Sequence[int]]) -> list[str]:
    """A few letters for each probe's ids."""
    return [
        hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:8] for tokens in ids
    ]


def difference(one: Sequence[str], other: Sequence[str]) -> str:
    """How many probes two fingerprints differ in, and the first of these; empty where in none."""
    if len(one) != len(other):
        return "they were asked with other texts: use the same version of Rollstream"
    differing = [probe for probe, a, b in zip(PROBES, one, other, strict=False) if a != b]
    if not differing:
        return ""
    return f"{len(differing)} of {len(PROBES)} texts become other tokens, e.g. {differing[0]!r}"
