"""Work of an old owner waits for its grace, is forgotten once it is done, and is never lost."""

from rollstream.shared.handover import Handover
from rollstream.shared.intake import Work
from rollstream.shared.partition import Partition
from rollstream.shared.seen import Unit


def test_what_is_left_is_due_after_the_grace():
    machine, later = Partition(1), Handover(600.0)
    for at, unit in enumerate((Unit(0, 0), Unit(0, 1))):
        machine.read(at, unit)
        later.add(Work(0, unit, 2, None), 100.0, going_on_s=60.0)
    assert (later.partitions, len(later)) == ({0}, 2)
    machine.found(Unit(0, 0), 2, 0)
    assert later.due(159.0, {0: machine}) == []
    assert len(later) == 1
    assert [work.unit for work in later.due(160.0, {0: machine})] == [Unit(0, 1)]
    assert (later.partitions, len(later)) == (set(), 0)


def test_a_partition_that_was_lost_takes_its_work_along():
    later = Handover(600.0)
    later.add(Work(3, Unit(3, 0), 2, None), 0.0, going_on_s=1.0)
    assert later.due(0.0, {}) == []
    assert len(later) == 0


def test_nothing_waits_for_longer_than_a_sample_may_take():
    machine, later = Partition(1), Handover(10.0)
    machine.read(0, Unit(0, 0))
    later.add(Work(0, Unit(0, 0), 2, None), 0.0, going_on_s=600.0)
    assert len(later.due(10.0, {0: machine})) == 1
