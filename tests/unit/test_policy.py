"""Which weights are due, what a label means, and which files must be kept."""

import pytest

from rollstream.shared.control import Acked, PolicyLive, PolicyVersion
from rollstream.shared.policy import LOADING, Policy, label_of, version_of


@pytest.mark.parametrize(("label", "version"), [
    ("default", 0), ("0", 0), ("12", 12), ("12@3", 12), (LOADING, None),
    ("step-1", None), ("", None),
])
def test_what_a_label_means(label: str, version: int | None):
    assert version_of(label) == version


def test_labels_of_one_version_differ_by_epoch():
    assert label_of(7, 0) == "7"
    assert label_of(7, 2) == "7@2"
    assert version_of(label_of(7, 2)) == 7


def test_nothing_is_due_before_the_trainer_says_a_version():
    policy = Policy()
    assert not policy.apply(PolicyVersion(version=3, implied=True))
    assert not policy.apply(Acked(batch_id=0))
    assert (policy.label, policy.needed()) == ("", [])


def test_going_back_gives_the_same_versions_other_labels():
    policy = Policy()
    for version in (1, 2, 3):
        assert policy.next_label(version) == str(version)
        assert policy.apply(PolicyVersion(version=version, weights=f"/w/{version}"))
    assert policy.next_label(2) == "2@1"
    assert policy.apply(PolicyVersion(version=2, epoch=1, weights="/w/again/2"))
    assert (policy.label, policy.weights) == ("2@1", "/w/again/2")
    assert policy.next_label(3) == "3@1"
    assert not policy.apply(PolicyVersion(version=2, epoch=1, weights="/w/again/2"))


def test_weights_are_needed_while_they_are_live_somewhere():
    policy = Policy()
    policy.apply(PolicyVersion(version=1, weights="/w/1"))
    for url in ("http://a", "http://b"):
        policy.apply(PolicyLive(url=url, label="1"))
    policy.apply(PolicyVersion(version=2, weights="/w/2"))
    policy.apply(PolicyVersion(version=3, weights="/w/3"))
    assert policy.needed() == ["/w/1", "/w/3"]
    policy.apply(PolicyLive(url="http://a", label="3"))
    assert policy.needed() == ["/w/1", "/w/3"]
    policy.apply(PolicyLive(url="http://b", label="3"))
    assert policy.needed() == ["/w/3"]
