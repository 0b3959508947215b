import pytest
from aiokafka.admin import NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from rollstream.shared import topics
from rollstream.shared.config import ConfigError
from rollstream.shared.runs import Deadlines

DAY_MS = 86_400_000


def test_names():
    assert topics.data_topic("rs", "r-1", "rl", "rollouts") == "rs.r-1.rl.rollouts"
    assert topics.control_topic("rs", "r-1") == "rs.r-1.control"
    assert topics.runs_topic("rs") == "rs.runs"


@pytest.mark.parametrize("run", ["", "A", "a.b", "a_b", "x" * 64])
def test_bad_run_id_names_field_value_and_fix(run):
    with pytest.raises(ConfigError, match=r"run = .*: use 1 to 63"):
        topics.data_topic("rs", run, "rl", "rollouts")


def test_a_prefix_with_a_dot_is_refused():
    """With it, run `dev` of `rs` and prefix `rs.dev` would own the same topics."""
    with pytest.raises(ConfigError, match=r"prefix = rs\.dev"):
        topics.runs_topic("rs.dev")


@pytest.mark.parametrize(("pipeline", "kind"), [("r.l", "prompts"), ("rl", "a.b"), ("rl", "")])
def test_bad_pipeline_or_kind(pipeline, kind):
    with pytest.raises(ConfigError, match="use 1 to 60"):
        topics.data_topic("rs", "r", pipeline, kind)


def test_the_longest_name_is_one_that_kafka_takes():
    assert len(topics.data_topic("p" * 63, "r" * 63, "l" * 60, "k" * 60)) <= 249


def test_parse_name_knows_its_own_topics_only():
    assert topics.parse_name("rs", "rs.r1.rl.scored") == topics.TopicName("r1", "rl", "scored")
    for other in ("rs.runs", "rs.r1.control", "other.r1.rl.scored", "rs.r1.rl.scored.x"):
        assert topics.parse_name("rs", other) is None


def test_specs_of_a_run():
    kinds = ["prompts", "distilled", "mine", "ledger", "dlq"]
    specs = {s.name: s for s in topics.run_specs("rs", "r", "rl", kinds, 12)}
    assert {name: s.retention_ms for name, s in specs.items()} == {
        "rs.r.rl.prompts": 7 * DAY_MS, "rs.r.rl.distilled": DAY_MS, "rs.r.rl.mine": 7 * DAY_MS,
        "rs.r.rl.ledger": -1, "rs.r.rl.dlq": 30 * DAY_MS, "rs.r.control": -1,
    }
    assert specs["rs.r.control"].partitions == 1
    assert {s.partitions for n, s in specs.items() if n != "rs.r.control"} == {12}
    assert not any(s.compacted for s in specs.values())
    assert topics.runs_spec("rs").compacted


def test_a_run_with_long_deadlines_has_topics_that_keep_longer():
    long = topics.run_specs("rs", "r", "rl", ["prompts", "distilled", "ledger"], 1, 3 * DAY_MS)
    assert [s.retention_ms for s in long] == [7 * DAY_MS, 3 * DAY_MS, -1, -1]
    assert Deadlines().least_retention_ms == 2000 * (1800 + 28_800) < DAY_MS
    assert Deadlines(sample_s=86_400).least_retention_ms == 2000 * (86_400 + 28_800)


async def test_topics_that_forget_too_early_are_refused(admin, prefix):
    specs = topics.run_specs(prefix, "one", "rl", ["prompts", "distilled", "ledger"], 1)
    await topics.create(admin, specs)
    await topics.check_retention(admin, specs, DAY_MS)
    with pytest.raises(ConfigError, match=rf"{DAY_MS} of {prefix}.one.rl.distilled: set it to"):
        await topics.check_retention(admin, specs, DAY_MS + 1)
    names = [spec.name for spec in specs]
    assert await topics.shortest_retention_s(admin, names) == DAY_MS / 1000
    ledger = topics.TopicSpec(f"{prefix}.two.rl.ledger", 1, DAY_MS)
    await topics.create(admin, [ledger])
    kept = topics.run_specs(prefix, "two", "rl", ["ledger"], 1)
    with pytest.raises(ConfigError, match=r"two.rl.ledger: set it to -1"):
        await topics.check_retention(admin, kept[:1], 1)


@pytest.mark.kafka
@pytest.mark.parametrize(("setting", "field"), [
    ({"retention.bytes": "1000000"}, "retention.bytes"), ({"cleanup.policy": "compact"}, "cleanup"),
])
async def test_topics_that_delete_by_size_or_compact_are_refused(
    kafka_admin, prefix, setting, field
):
    spec = topics.TopicSpec(f"{prefix}.r.rl.prompts", 1)
    made = NewTopic(spec.name, 1, 1, topic_configs=setting)
    await kafka_admin.create_topics([made])
    with pytest.raises(ConfigError, match=field):
        await topics.check_retention(kafka_admin, [spec], 1)


def test_partitions_must_be_positive():
    with pytest.raises(ConfigError, match="--partitions = 0"):
        topics.run_specs("rs", "r", "rl", ["prompts"], 0)


@pytest.mark.parametrize(("replication", "in_sync"), [(1, "1"), (2, "1"), (3, "2")])
def test_one_replica_may_be_down(replication, in_sync):
    configs = topics.topic_configs(topics.runs_spec("rs"), replication)
    assert configs["min.insync.replicas"] == in_sync
    assert configs["cleanup.policy"] == "compact"


async def test_create_verify_list_delete(admin, prefix):
    specs = topics.run_specs(prefix, "one", "rl", ["prompts", "ledger"], 3)
    other = topics.run_specs(prefix, "one-b", "rl", ["prompts"], 2)
    with pytest.raises(ConfigError, match="does not exist"):
        await topics.verify(admin, specs)
    assert not await topics.list_run_topics(admin, prefix), "asking must not create"
    made = await topics.create(admin, [topics.runs_spec(prefix), *specs, *other])
    assert len(made) == 6
    assert await topics.create(admin, specs) == []
    assert await topics.list_run_topics(admin, prefix, "one") == {
        f"{prefix}.one.control": 1,
        f"{prefix}.one.rl.ledger": 3,
        f"{prefix}.one.rl.prompts": 3,
    }
    wrong = topics.run_specs(prefix, "one", "rl", ["prompts"], 4)
    with pytest.raises(ConfigError, match="has 3 partitions, not 4"):
        await topics.create(admin, wrong)
    assert len(await topics.delete(admin, prefix, "one")) == 3
    assert await topics.list_run_topics(admin, prefix) == {
        f"{prefix}.one-b.control": 1, f"{prefix}.one-b.rl.prompts": 2,
    }
    assert len(await topics.create(admin, specs)) == 3, "a deleted run may come back"


@pytest.mark.kafka
async def test_kafka_has_the_configs_that_we_gave(kafka_admin, prefix):
    name = topics.runs_topic(prefix)
    await topics.create(kafka_admin, [topics.runs_spec(prefix)])
    resource = ConfigResource(ConfigResourceType.TOPIC, name)
    [answer] = await kafka_admin.describe_configs([resource])
    values = {entry[0]: entry[1] for entry in answer.resources[0][4]}
    assert values["cleanup.policy"] == "compact"
    assert values["retention.ms"] == "-1"
    assert values["max.message.bytes"] == str(4 * 1024 * 1024)
    assert values["min.insync.replicas"] == "1"


@pytest.mark.kafka
async def test_a_refused_topic_says_why(kafka_admin, prefix):
    bad = topics.TopicSpec(f"{prefix}.x.rl.prompts", 0)
    with pytest.raises(topics.TopicError, match=r"refuses to create .*rl.prompts.*artitions"):
        await topics.create(kafka_admin, [bad], timeout_s=3)
