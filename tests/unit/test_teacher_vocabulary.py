"""A run is refused whose teacher has another tokenizer, with a text that tells them apart."""

import pytest
from making import run

from rollstream.services.cli.propose import Refused, check_tokenizers
from rollstream.shared.inference.vocabulary import PROBES, fingerprint
from rollstream.shared.routes import builtin, stages
from rollstream.shared.runs import Teacher

RUN = run(
    stages=stages(builtin(), "rl", teacher=True), model="small",
    teacher=Teacher(endpoint="t", model="big"),
)
SAME = fingerprint([list(text.encode()) for text in PROBES])
OTHER = fingerprint([list(text.encode()) if text.isascii() else [0] for text in PROBES])


def test_the_same_tokenizer_will_do_and_so_does_one_that_nobody_knows():
    check_tokenizers(RUN, {"generator": {"tokenizer": SAME}, "teacher-distiller": {
        "tokenizer": SAME}, "scorer": {}})
    check_tokenizers(RUN, {"generator": {}, "teacher-distiller": {"tokenizer": SAME}})


def test_another_one_is_refused_with_a_text_that_tells_them_apart():
    with pytest.raises(Refused) as refused:
        check_tokenizers(RUN, {"generator": {"tokenizer": SAME}, "teacher-distiller": {
            "tokenizer": OTHER}})
    assert str(refused.value).startswith(
        "teacher-distiller: teacher.model = big: its vocabulary is not that of small ("
    )
    assert "naïve" in str(refused.value)
