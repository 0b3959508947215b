"""Each token's place in the text, parts of characters included."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.shared.inference.text_offsets import PARTIAL, text_offsets

P = PARTIAL


@pytest.mark.parametrize(("pieces", "text", "offsets"), [
    ([], "", []),
    (["a", " b", "c"], "a bc", [0, 1, 3]),
    (["<s>", "", "x"], "<s>x", [0, 3, 3]),
    # One character in three parts, between others and at the end.
    (["a", P, P, P, "b"], "a🙂b", [0, 1, 1, 1, 2]),
    (["a", P, P], "aé", [0, 1, 1]),
    # Text and the beginning of a character in one token; two characters in parts after another.
    (["a" + P, P, "b"], "a🙂b", [0, 1, 2]),
    (["x", P, P, P, P, "y"], "x🙂🙃y", [0, 1, 1, 1, 1, 3]),
    # What does not fit together is not guessed.
    (["a", "b"], "ac", None),
    (["a"], "ab", None),
    (["a", P, "z"], "a🙂b", None),
])
def test_offsets(pieces: list[str], text: str, offsets: list[int] | None):
    assert text_offsets(pieces, text) == offsets


@given(st.lists(st.text("ab🙂 é", max_size=4)))
def test_whole_pieces_are_exact(pieces: list[str]):
    found = text_offsets(pieces, "".join(pieces))
    assert found == [len("".join(pieces[:t])) for t in range(len(pieces))]


@given(st.lists(st.tuples(st.text("abc ", min_size=1, max_size=3), st.booleans()), max_size=20))
def test_after_parts_the_next_whole_piece_is_found(words: list[tuple[str, bool]]):
    pieces, text, starts = [], "", []
    for word, parts in words:
        starts.append((len(pieces), len(text)))
        pieces.append(word)
        text += word
        if parts:
            pieces += [P, P]
            text += "🙂"
    found = text_offsets(pieces, text)
    assert found is not None
    assert [found[t] for t, _ in starts] == [at for _, at in starts]
