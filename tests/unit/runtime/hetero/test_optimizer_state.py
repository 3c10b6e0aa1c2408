"""State of several optimizers as one, and back."""

import pytest

from mindspeed_autoparallel.runtime.hetero.optimizer_state import can_be_joined, identity, join, split


def part(prefix, decayed, plain):
    """A state dict of torch's Adam with two groups; moments are named so that they can be followed."""
    count = decayed + plain
    return {
        "state": {**{i: {"exp_avg": f"{prefix}{i}"} for i in range(count)}, "common_step": 7},
        "param_groups": [
            {"wd_mult": 1.0, "lr": 0.1, "params": list(range(decayed))},
            {"wd_mult": 0.0, "lr": 0.1, "params": list(range(decayed, count))},
        ],
    }


def test_joined_groups_are_those_of_one_optimizer_and_every_moment_is_there():
    joined = join([part("text", 2, 1), part("image", 1, 2)])
    assert can_be_joined(joined)
    assert [group["wd_mult"] for group in joined["param_groups"]] == [1.0, 0.0]
    assert [group["params"] for group in joined["param_groups"]] == [[0, 1, 3], [2, 4, 5]]
    moments = [joined["state"][i]["exp_avg"] for i in range(6)]
    assert moments == ["text0", "text1", "text2", "image0", "image1", "image2"]
    assert joined["state"]["common_step"] == 7


def test_splitting_gives_every_part_its_own_again():
    parts = [part("text", 2, 1), part("image", 1, 2), part("audio", 3, 0)]
    assert split(join(parts), [p["param_groups"] for p in parts]) == parts


def test_values_of_the_loaded_group_win_over_the_current_ones():
    saved = join([part("text", 1, 1)])
    saved["param_groups"][0]["lr"] = 0.5
    (found,) = split(saved, [part("now", 1, 1)["param_groups"]])
    assert [group["lr"] for group in found["param_groups"]] == [0.5, 0.1]


def test_a_group_that_the_checkpoint_lacks_is_named():
    foreign = [{"wd_mult": 3.0, "params": [0]}]
    with pytest.raises(ValueError, match=r"no parameter group .*3\.0"):
        split(join([part("text", 1, 1)]), [foreign])
    assert identity({"pre_wd_mult": 3.0}) == identity({"wd_mult": 3.0})


def half_precision(prefix, decayed, plain):
    """As Megatron's optimizer of bf16 weights: torch's state and fp32 copies, group by group."""
    groups = [[f"{prefix}-copy{i}" for i in range(decayed)], [f"{prefix}-copy{decayed + i}" for i in range(plain)]]
    return {"optimizer": part(prefix, decayed, plain), "fp32_from_fp16_params": groups}


def test_copies_of_half_precision_weights_follow_their_groups():
    parts = [half_precision("text", 2, 1), half_precision("image", 1, 2)]
    joined = join(parts)
    assert can_be_joined(joined)
    assert joined["fp32_from_fp16_params"] == [
        ["text-copy0", "text-copy1", "image-copy0"],
        ["text-copy2", "image-copy1", "image-copy2"],
    ]
    assert [group["params"] for group in joined["optimizer"]["param_groups"]] == [[0, 1, 3], [2, 4, 5]]
    assert split(joined, [p["optimizer"]["param_groups"] for p in parts]) == parts


def test_the_reshardable_state_of_distributed_optimizers_is_numbered_through():
    def distributed(prefix, size, weight_decays):
        groups = [{"wd_mult": value, "step": 4} for value in weight_decays]
        return {"optimizer": {"param_groups": groups}, "param_state": {i: f"{prefix}{i}" for i in range(size)}}

    joined = join([distributed("text", 3, [1.0, 0.0]), distributed("image", 2, [0.0])])
    assert list(joined["param_state"].values()) == ["text0", "text1", "text2", "image0", "image1"]
    assert [group["wd_mult"] for group in joined["optimizer"]["param_groups"]] == [0.0, 1.0]
    text, image = split(joined, [[], []], [3, 2])
    assert text["param_state"] == {0: "text0", 1: "text1", 2: "text2"}
    assert image["param_state"] == {0: "image0", 1: "image1"}
