import msgspec
import pytest

from evenload.types.timeline import CAUSE_LABELS, TimeSplit, mean_time_split


def split(**seconds: float) -> TimeSplit:
    return TimeSplit(**(dict.fromkeys(CAUSE_LABELS, 0.0) | seconds))


def test_every_field_has_a_label_and_useful_comes_first() -> None:
    assert list(CAUSE_LABELS) == list(TimeSplit.__struct_fields__)
    assert len(set(CAUSE_LABELS.values())) == len(CAUSE_LABELS)
    assert split().parts()[0][0] == "useful work"


def test_losses_are_sorted_and_leave_useful_work_out() -> None:
    found = split(useful_s=5.0, padding_s=0.5, dependency_s=2.0)
    assert found.losses()[:2] == (("dependency", 2.0), ("padding", 0.5))
    assert found.total_s() == 7.5
    assert "useful work" not in dict(found.losses())


def test_mean_over_steps_and_back_from_json() -> None:
    found = mean_time_split([split(useful_s=1.0), split(useful_s=2.0, padding_s=1.0)])
    assert (found.useful_s, found.padding_s, found.total_s()) == (1.5, 0.5, 2.0)
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(found)), TimeSplit) == found
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"useful_s": 1.0}, TimeSplit)
