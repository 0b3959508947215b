"""Tokenizers are compared by what they do, and the refusal says with which text."""

from rollstream.shared.inference.vocabulary import PROBES, difference, fingerprint


def ids(text: str) -> list[int]:
    return list(text.encode())


def test_equal_tokenizers_have_one_fingerprint():
    one = fingerprint([ids(text) for text in PROBES])
    assert difference(one, fingerprint([ids(text) for text in PROBES])) == ""
    assert len(set(one)) == len(PROBES)


def test_the_first_text_that_differs_is_named():
    one = fingerprint([ids(text) for text in PROBES])
    other = fingerprint([ids(text.replace("🙂", ":-)")) for text in PROBES])
    assert difference(one, other).startswith(f"1 of {len(PROBES)} texts become other tokens")
    assert "🙂" in difference(one, other)


def test_ids_are_told_apart_by_their_borders():
    assert fingerprint([[1, 23]]) != fingerprint([[12, 3]])


def test_other_probes_are_no_comparison():
    assert "same version" in difference(["a"], ["a", "b"])
