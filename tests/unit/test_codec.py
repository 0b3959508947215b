"""Every record survives the wire in both formats; foreign bytes are refused by one exception."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.shared.arrays import pack, unpack
from rollstream.shared.codec import (
    Undecodable,
    decode,
    encode,
    header_int,
    header_text,
)
from rollstream.shared.records import (
    Distill,
    Distilled,
    Ended,
    EnvRef,
    Failure,
    Kind,
    Outcome,
    Record,
    Rollout,
    Row,
    Sample,
    Scored,
    Sequence,
    Stop,
    VersionSpan,
    group_of,
    passed_on,
)

GOLDEN = Path(__file__).parent / "golden"


def rollout(n: int = 7, i: int = 1, tokens: int = 5) -> Rollout:
    return Rollout(
        run="r", pipeline="rl", n=n, i=i, k=2, env=EnvRef("e", {"a": 1}, "v0", "f" * 8),
        row=Row(prompt=[{"role": "user", "content": "2 + 2 = é?"}], answer="4", info={"x": [1]}),
        completion=[{"role": "assistant", "content": "4"}], stop=Stop.STOP, finish_reason="stop",
        sequences=[Sequence(
            tokens=pack(range(tokens), "int32"), mask=pack([0] * (tokens - 1) + [1], "uint8"),
            logprobs=pack([0.0] * (tokens - 1) + [-0.25], "float32"),
            versions=[VersionSpan(3, 0, tokens)],
        )],
    )


def distilled() -> Distilled:
    group = passed_on(Distilled, group_of([rollout(i=0), rollout(i=1)]))
    group.samples[0].sequences[0].distill = Distill(
        k=2, token_ids=pack(np.zeros((5, 2)), "int32"), logprobs=pack(np.zeros((5, 2)), "float16"),
        own=pack([0.0] * 5, "float32"),
    )
    return group


@pytest.mark.parametrize("format", ["json", "msgpack"])
@pytest.mark.parametrize(
    "record", [rollout(), group_of([rollout(i=0), rollout(i=1)]), distilled()],
    ids=["rollout", "scored", "distilled"],
)
def test_a_record_comes_back_equal(record, format):
    assert decode(*encode(record, format)) == record


@given(st.lists(st.floats(-50, 0, width=32)))
def test_logprobs_come_back_to_the_bit(values):
    record = rollout()
    record.sequences[0].logprobs = pack(values, "float32")
    back = decode(*encode(record))
    assert isinstance(back, Rollout)
    packed = back.sequences[0].logprobs
    assert packed is not None
    assert unpack(packed).tolist() == values


def test_headers_tell_the_route_without_the_body():
    _, headers = encode(rollout())
    assert header_text(headers, "rs-type") == "rollout"
    assert [header_int(headers, f"rs-{name}") for name in ("group", "sample", "k")] == [7, 1, 2]
    _, headers = encode(distilled(), "msgpack")
    assert header_text(headers, "rs-kind") == "scored"
    assert header_int(headers, "rs-policy-version") == 3
    assert header_int(headers, "rs-sample") is None


def test_only_large_msgpack_is_compressed():
    small, headers = encode(distilled(), "msgpack")
    assert header_text(headers, "content-encoding") is None
    big = group_of([rollout(i=0, tokens=20_000), rollout(i=1, tokens=20_000)])
    body, headers = encode(big, "msgpack")
    assert header_text(headers, "content-encoding") == "zstd"
    assert len(small) < len(body) < 320_000
    assert decode(body, headers) == big
    assert header_text(encode(big, "json")[1], "content-encoding") is None


@pytest.mark.parametrize("body", [None, b"", b"{}", b"\xff\xfe", b'{"type":"nonsense"}',
                                  b'{"type":"prompt","run":"r"}'])
@pytest.mark.parametrize("headers", [[], [("content-type", b"application/msgpack")],
                                     [("content-encoding", b"zstd")]])
def test_foreign_bytes_are_undecodable(body, headers):
    with pytest.raises(Undecodable):
        decode(body, headers)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_nan_or_infinity_ever_leaves(value):
    with pytest.raises(ValueError, match="NaN or infinity"):
        pack([0.0, value], "float32")


def test_what_version_1_wrote_decodes():
    lines = (GOLDEN / "records-v1.jsonl").read_bytes().splitlines()
    kinds = {type(decode(line, [])).__name__ for line in lines}
    assert kinds == {kind.__name__ for kind in Record.__args__}


def test_unknown_fields_of_a_newer_version_are_no_error():
    body, headers = encode(Ended(n=1, leaf="x", outcome=Outcome.DELIVERED))
    newer = msgspec.json.encode(msgspec.json.decode(body) | {"v": 2, "colour": "blue"})
    assert isinstance(decode(newer, headers), Ended)


def test_a_failed_rollout_is_never_a_reward():
    failed = Rollout(
        run="r", pipeline="rl", n=0, i=0, k=1, env=EnvRef("e"), row=Row(prompt=[]),
        stop=Stop.ERROR, error=Failure("X", "y"),
    )
    group = group_of([failed])
    assert [sample.reward for sample in group.samples] == [None]
    assert group.kind is Kind.SCORED
    assert isinstance(group, Scored)
    assert isinstance(group.samples[0], Sample)
    assert isinstance(decode(*encode(group)), Scored)
