"""Where each token's text begins in the text of them all (pure).

So that a trainer can align token sequences across tokenizers. A server gives the tokens' texts one
by one, and the whole text. Parts of a character read U+FFFD there: a token in a run of them begins
where the run begins.
"""

from __future__ import annotations

from collections.abc import Sequence

PARTIAL = "\N{REPLACEMENT CHARACTER}"


def text_offsets(pieces: Sequence[str], text: str) -> list[int] | None:
    """The offset of each piece, in characters; None where pieces and text don't fit together."""
    offsets: list[int] = []
    at, in_part = 0, False
    for piece in pieces:
        if in_part and (not piece or PARTIAL in piece):
            offsets.append(at)
            continue
        if in_part:
            # The character that was in parts lies before this piece.
            at = text.find(piece, at + 1)
            if at < 0:
                return None
            in_part = False
        offsets.append(at)
        clean = piece.rstrip(PARTIAL)
        if PARTIAL in clean or not text.startswith(clean, at):
            if piece.startswith(PARTIAL):
                in_part = True
                continue
            return None
        at += len(clean)
        in_part = clean != piece
    return offsets if in_part or at == len(text) else None
