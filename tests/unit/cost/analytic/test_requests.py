"""What a request can say about its stages, its recompute and its training."""

import copy
from typing import Any

import pytest
from prices import memory_of, step_ms

from mindspeed_autoparallel.cost.analytic.placement import layout_counts
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.request_keys import unknown_keys
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.predict import predict_one

_REQUEST: dict[str, Any] = {
    "model": {"type": "gpt", "num_layers": 16, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 12288, "seq": 4096,
              "vocab": 32000, "swiglu": True},
    "hw": {"gpu": "H100", "num_gpus": 8},
    "parallel": {"tp": 2, "pp": 4},
    "train": {"gbs": 16, "mbs": 1},
}  # fmt: skip


def _with(**changes: dict[str, Any]) -> dict[str, Any]:
    request = copy.deepcopy(_REQUEST)
    for section, values in changes.items():
        request[section].update(values)
    return request


def _layers(**parallel: Any) -> list[int]:
    return [stage.num_layers for stage in read_workload(_with(parallel=parallel)).stages]


def _ms(**changes: dict[str, Any]) -> float:
    work = read_workload(_with(**changes))
    return step_ms(work)


def _peaks(**changes: dict[str, Any]) -> list[float]:
    work = read_workload(_with(**changes))
    return [memory_of(work, stage).peak_bytes for stage in range(work.pipeline_size)]


def test_layers_lie_where_the_run_puts_them() -> None:
    assert _layers() == [4, 4, 4, 4]
    assert _layers(num_layer_list=[3, 5, 5, 3]) == [3, 5, 5, 3]
    assert _layers(num_layer_list="3,5,5,3") == [3, 5, 5, 3]
    assert _layers(first_stage_layers=2, last_stage_layers=2) == [2, 6, 6, 2]
    assert _layers(pipeline_layout="Etttt|ttttt|ttttt|ttL") == [4, 5, 5, 2]
    assert _layers(vpp=2, pipeline_layout="Et|ttt|ttt|tt|(tt|)*3tL") == [3, 5, 5, 3]
    assert _layers(noop_layers=[0, 15]) == [3, 4, 4, 3]


@pytest.mark.parametrize(("size", "gbs", "runs"), [(0, 32, True), (5, 36, True), (5, 32, False), (9, 32, False)])
def test_group_sizes_are_those_that_megatron_runs(size: int, gbs: int, runs: bool) -> None:
    """4 to all microbatches (8, or 9 of 36 samples), with no remainder below the pipeline size."""
    request = _with(
        parallel={"tp": 2, "pp": 4, "vpp": 2, "microbatch_group_size": size}, hw={"num_gpus": 32}, train={"gbs": gbs}
    )
    if runs:
        assert read_workload(request).num_microbatches == gbs // 4
    else:
        with pytest.raises(ConfigError, match=f"interleaving runs 8 microbatches .* not in groups of {size}"):
            read_workload(request)


def test_embedding_and_loss_count_as_layers_where_the_request_sets_it() -> None:
    request = _with(model={"num_layers": 14}, parallel={"account_for_embedding": True, "account_for_loss": True})
    assert [stage.num_layers for stage in read_workload(request).stages] == [3, 4, 4, 3]


def test_layers_that_do_not_divide_are_placed_with_the_fewest_at_the_end_and_a_note() -> None:
    uneven = _with(model={"num_layers": 14})
    assert [stage.num_layers for stage in read_workload(uneven).stages] == [4, 4, 3, 3]
    assert any("stages of 4, 4, 3, 3 layers are assumed" in note for note in predict_one(uneven)["notes"])
    with pytest.raises(ConfigError, match="4 stages are more than the 2 layers"):
        read_workload(_with(model={"num_layers": 2}))


def test_layouts_that_repeat_are_unfolded() -> None:
    assert layout_counts("Et*3|(tt|)*2t*4mL", 11, 4, 1) == [3, 2, 2, 4]
    with pytest.raises(ConfigError, match="cannot be read at 'x"):
        layout_counts("Etx|tL", 2, 2, 1)


def test_layouts_may_have_commas() -> None:
    request = _with(parallel={"pipeline_layout": "E,t*3|t*5|t*4|t*4,L"})
    assert [stage.num_layers for stage in read_workload(request).stages] == [3, 5, 4, 4]


def test_partly_recomputed_stages_lie_between_none_and_all_in_time_and_memory() -> None:
    block = {"recompute": "full", "recompute_method": "block"}
    trains = [{"recompute": "none"}, *({**block, "recompute_num_layers": n} for n in (1, 2, 4)), {"recompute": "full"}]
    times = [_ms(train=train) for train in trains]
    assert times == sorted(times)
    assert times[3] == times[4]
    first = [_peaks(train=train)[0] for train in trains]
    assert first == sorted(first, reverse=True)


def test_groups_of_recomputed_layers_keep_one_input_each_and_need_a_whole_group_for_a_moment() -> None:
    one, four = (
        _peaks(train={"recompute": "full", "recompute_num_layers": n}, parallel={"pp": 1, "tp": 8}) for n in (1, 4)
    )
    assert four[0] != one[0]
    assert _ms(train={"recompute": "full", "recompute_num_layers": 4}) == _ms(train={"recompute": "full"})


def test_adapters_have_no_gradients_and_states_but_their_own() -> None:
    frozen = {"lora": {"r": 8, "alpha": 16}}
    assert max(_peaks(train=frozen)) < 0.5 * max(_peaks())
    assert 0.5 < _ms(train=frozen) / _ms() < 0.9


def test_preference_training_runs_pairs_and_a_frozen_reference() -> None:
    plain, simple, direct = (_ms(train={"task": task}) for task in (None, "simpo", "dpo"))
    assert 1.7 < simple / plain < 2.1
    assert 1.25 < direct / simple < 1.4
    assert max(_peaks(train={"task": "dpo"})) > max(_peaks(train={"task": "simpo"})) > max(_peaks())


def test_documents_that_share_a_sequence_do_not_attend_to_each_other() -> None:
    long = {"seq": 65536}
    assert _ms(model=long, train={"mean_document": 4096}) < 0.7 * _ms(model=long)
    assert _ms(model=long, train={"mean_document": 65536}) == _ms(model=long)


def test_eight_bit_products_are_faster_and_attention_is_not() -> None:
    assert 0.55 < _ms(train={"precision": "fp8"}) / _ms() < 0.95
    long = {"seq": 131072}
    assert _ms(model=long, train={"precision": "fp8"}) / _ms(model=long) > _ms(train={"precision": "fp8"}) / _ms()


def test_kinds_of_context_parallelism_cost_differently() -> None:
    long = {"model": {"seq": 32768}, "hw": {"num_gpus": 32}}
    kinds = {kind: _ms(**long, parallel={"cp": 4, "cp_type": kind}) for kind in ("p2p", "a2a", "allgather")}
    assert len(set(kinds.values())) == 3
    with pytest.raises(ConfigError, match="cp_type is 'magic'"):
        _ms(**long, parallel={"cp": 4, "cp_type": "magic"})


def test_keys_that_are_only_misspelt_are_named_and_keys_of_sources_are_not() -> None:
    request = _with(model={"name": "llama", "head_dim": 128}, train={"flags": "--x", "recompute_layers": 2})
    assert unknown_keys(request) == ["train.recompute_layers"]


def test_busy_experts_take_longer() -> None:
    experts = {"type": "moe", "num_experts": 8, "topk": 2}
    even = _ms(model=experts, parallel={"tp": 1, "ep": 2, "pp": 4})
    assert (
        1.05 < _ms(model=experts, parallel={"tp": 1, "ep": 2, "pp": 4}, train={"routing_imbalance": 1.5}) / even < 1.5
    )


def test_hybrid_models_are_answered() -> None:
    model = {"type": "hybrid", "layer_pattern": "M-M-M*-M-M-M-M*-", "mamba": {"num_heads": 64, "head_dim": 128}}
    assert 0 < _ms(model=model) < _ms(model={"type": "gpt"}) * 2
    with pytest.raises(ConfigError, match="one of"):
        _ms(model={**model, "layer_pattern": "MxM"})


def test_a_capacity_that_leaves_an_expert_without_rows_is_refused() -> None:
    experts = {"type": "moe", "num_experts": 8, "topk": 2}
    with pytest.raises(ConfigError, match=r"capacity_factor is 4\.94066e-324, must be 0"):
        read_workload(_with(model={**experts, "capacity_factor": 5e-324}))
    assert read_workload(_with(model={**experts, "capacity_factor": 0.01})).routed_rows > 0
