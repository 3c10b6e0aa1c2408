import pytest
from emulated_device.plans import WANTED, planned
from small_profile import small_profile

from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.planner.rank_memory import sends_of
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.schedule import SENDS
from mindspeed_autoparallel.spec import Layout
from mindspeed_autoparallel.spec.codec import to_json

INTERLEAVED = next(wanted for wanted in WANTED if wanted.virtual_size > 1)


def test_a_host_that_waits_more_takes_longer():
    steps = {sends: planned(INTERLEAVED, sends).plan.step.pipeline_us for sends in ("eager", "overlapped", "freed")}
    assert steps["eager"] <= steps["overlapped"] < steps["freed"]


def test_the_profile_records_how_the_host_sends():
    costs = planned(INTERLEAVED, "overlapped").plan.extra.costs
    assert costs["interleaved_sends"] == "overlapped"


def test_sends_follow_schedule_and_profile():
    profile = small_profile(interleaved_sends="flushed")
    assert sends_of(profile, Layout()) == "blocking"
    assert sends_of(profile, Layout(pipeline_size=2, virtual_size=2, schedule="interleaved")) == "flushed"
    assert sends_of(small_profile(memory_semantics="mindspeed"), Layout()) == "eager"


@pytest.mark.parametrize("sends", SENDS)
def test_a_profile_accepts_every_kind_of_sends(sends):
    profile = small_profile(interleaved_sends=sends)
    assert Profile.parse(to_json(profile)).interleaved_sends == sends


def test_unknown_sends_of_a_profile_are_named():
    with pytest.raises(ProfileError, match="telepathic"):
        small_profile(interleaved_sends="telepathic")


def test_a_profile_without_the_key_is_read():
    value = to_json(small_profile())
    del value["interleaved_sends"]
    assert Profile.parse(value).interleaved_sends == "freed"
