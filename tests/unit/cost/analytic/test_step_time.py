"""Step time: properties that hold for any calibration."""

import copy
import dataclasses

import pytest
from prices import step_ms

from mindspeed_autoparallel.cost.analytic.kernels import product_us
from mindspeed_autoparallel.cost.analytic.layer_time import layer_time
from mindspeed_autoparallel.cost.analytic.mlps import exchange_us, widening
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.step_time import boundary_send_us, one_f_one_b_us
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.collectives import Fabric
from mindspeed_autoparallel.cost.overlap import sent_once_share
from mindspeed_autoparallel.errors import ConfigError

_REQUEST = {
    "model": {"type": "gpt", "num_layers": 24, "hidden": 2048, "heads": 16, "seq": 1024},
    "hw": {"gpu": "A100", "num_gpus": 8},
    "parallel": {"tp": 2, "pp": 2},
    "train": {"gbs": 32, "mbs": 2, "recompute": "full"},
}

_NETWORK = Fabric(
    devices_per_node=8,
    link_bytes_per_us=1e18,
    link_latency_us=0.0,
    inter_bytes_per_us=8.0,
    inter_latency_us=0.0,
    exchange_bytes_per_us=1.0,
)
"""Links inside a node take no time; a node's network moves 8 bytes per microsecond, 1 per device."""


def _ms(**changes: dict) -> float:
    request = copy.deepcopy(_REQUEST)
    for section, values in changes.items():
        request[section].update(values)
    work = read_workload(request)
    return step_ms(work)


def test_equal_stages_take_the_textbook_time() -> None:
    assert one_f_one_b_us([10.0] * 4, 0.0, 8, 1) == 10.0 * (8 + 3)


def test_interleaving_divides_fill_and_drain_by_the_chunks() -> None:
    assert one_f_one_b_us([10.0] * 4, 0.0, 8, 3) == 10.0 * (8 + 3 / 3)


def test_the_slowest_stage_sets_the_pace() -> None:
    assert one_f_one_b_us([10.0, 20.0], 0.0, 8, 1) == 20 * 8 + 10


def test_full_recompute_costs_between_a_fifth_and_a_half_more() -> None:
    ratio = _ms() / _ms(train={"recompute": "none"})
    assert 1.2 < ratio < 1.5


def test_twice_the_batch_takes_less_than_twice_the_time_and_more_than_one_and_a_half() -> None:
    assert 1.5 < _ms(train={"gbs": 64}) / _ms() < 2


def test_published_rows_of_the_calibration_source_are_met() -> None:
    # vTrain ground truth, 24 layers of hidden 2048 on 8 devices: tp2 pp2 dp2, batch 32, microbatch 2 took 553.8 ms.
    assert _ms() == pytest.approx(553.8, rel=0.12)


def test_a_collective_across_nodes_is_slower_than_inside_one() -> None:
    device = find_device("A100")
    fabric = Fabric.of(device, device.efficiency("megatron-core"), 8, None)
    assert fabric.all_reduce_us(2**28, 8, 8) > fabric.all_reduce_us(2**28, 8, 1)
    assert fabric.all_reduce_us(2**28, 1, 1) == 0


@pytest.mark.parametrize(
    ("section", "values", "word"),
    [
        ("parallel", {"tp": 3}, "does not divide"),
        ("parallel", {"dp": 8}, "needs 32 devices; there are 8"),
        ("parallel", {"pp": 8, "tp": 1, "vpp": 4}, "32 stages are more than the 24 layers."),
        ("parallel", {"ep": 2}, "needs a model with experts"),
        ("train", {"gbs": 33}, "not divisible by"),
        ("train", {"mbs": 0}, "at least 1"),
        ("train", {"recompute": "some"}, "none, selective, full"),
        ("train", {"precision": "fp4"}, "known: fp16, bf16"),
        ("train", {"distillation": True}, "another run's"),
        ("parallel", {"num_distributed_optimizer_instances": 2}, "another run's"),
        ("train", {"optimizer": "muon"}, "known: adam"),
        ("parallel", {"schedule": "zbv"}, "known: 1f1b"),
        ("parallel", {"num_layer_list": [10, 10]}, "add up to 24"),
        ("parallel", {"pipeline_layout": "Ettt|L"}, "has 3 decoder layers"),
        ("model", {"heads": 17}, "not divisible"),
        ("model", {"num_layers": "many"}, "whole number"),
        ("hw", {"gpu": None}, "hw.gpu is missing"),
    ],
)
def test_requests_that_no_run_can_start_with_are_refused_with_the_rule(section: str, values: dict, word: str) -> None:
    request = copy.deepcopy(_REQUEST)
    request[section].update(values)
    with pytest.raises(ConfigError, match=word):
        read_workload(request)


@pytest.mark.parametrize(
    ("stack", "sequence_parallel", "share"),
    [("megatron-2021", False, 4), ("megatron-core", True, 4), ("megatron-core", False, 1)],
)
def test_messages_between_stages_are_split_over_tensor_ranks_where_the_software_splits_them(
    stack: str, sequence_parallel: bool, share: int
) -> None:
    request = copy.deepcopy(_REQUEST)
    request["hw"]["num_gpus"] = 64
    request["parallel"] = {"tp": 4, "pp": 8, "sp": sequence_parallel}
    request["train"]["stack"] = stack
    work = read_workload(request)
    hidden_states = 2 * 1024 * 2048 * 2  # microbatch x tokens x hidden x bytes, at one byte per microsecond and device
    assert boundary_send_us(work, _NETWORK) == pytest.approx(hidden_states / share)


def test_tokens_travel_once_to_each_node_and_over_each_devices_own_share_of_the_network() -> None:
    assert _NETWORK.dispatch_us(1024.0, 8, 1, 2) == pytest.approx(0.0, abs=1e-9)
    # One copy per token on two nodes: half of the bytes leave.
    assert _NETWORK.dispatch_us(1024.0, 16, 1, 1) == pytest.approx(512.0)
    # Eight copies: nearly every token has an expert on the other node, which one of its eight copies reaches.
    assert _NETWORK.dispatch_us(1024.0, 16, 1, 8) == pytest.approx(1024 / 8 * (1 - 0.5**8))
    # Ranks that lie further apart than a node is wide are on a node each.
    assert _NETWORK.dispatch_us(1024.0, 2, 64, 1) == pytest.approx(512.0)
    # Over more nodes more of the copies travel, never more than all.
    costs = [_NETWORK.dispatch_us(1024.0, 8 * nodes, 1, 4) for nodes in (1, 2, 4, 8, 64)]
    assert costs == sorted(costs)
    assert costs[-1] < 1024


def test_kernels_that_send_a_token_once_to_a_rank_take_the_ranks_it_goes_to() -> None:
    rack = dataclasses.replace(_NETWORK, devices_per_node=64, dispatch_bytes_per_us=2.0)
    # Every token has one expert: all of its rows travel, those that stay on their rank counted, too.
    assert rack.dispatch_us(1024.0, 8, 1, 1) == pytest.approx(512.0)
    # Four experts on two ranks: both ranks for all tokens but one in eight, which has all four on one rank.
    assert rack.dispatch_us(1024.0, 2, 1, 4) == pytest.approx(512.0 * 2 * (1 - 0.5**4) / 4)
    # Over several such domains their network is the longer way.
    assert rack.dispatch_us(1024.0, 128, 1, 1) == pytest.approx(512.0)
    assert rack.exchange_us(1024.0, 8, 1) == pytest.approx(0.0, abs=1e-9)
    # Links without a published rate of such kernels carry the same tokens, but for those that stay on their rank.
    linked = dataclasses.replace(rack, dispatch_bytes_per_us=0.0, link_bytes_per_us=1.0)
    share = 2 * (1 - 0.5**4) / 4
    times = [linked.dispatch_us(1024.0, 2, 1, 4, once=once) for once in (False, True)]
    assert times[1] / times[0] == pytest.approx(share)


def test_experts_in_turn_lie_on_few_ranks() -> None:
    """A gate of benchmarks gives a token the experts behind those of the token before."""
    assert sent_once_share(8, 8, in_order_of=128) == 1 / 8  # sixteen experts a rank, eight of them at a time
    assert sent_once_share(4, 64, in_order_of=128) == 2 / 4
    # Six at a time of sixteen a rank: every even start, of which those at 12 and 14 reach the next rank.
    assert sent_once_share(6, 8, in_order_of=128) == pytest.approx((1 + 2 / 8) / 6)


def test_a_dispatcher_that_sends_a_token_once_for_each_expert_sends_more_over_several_nodes() -> None:
    across = {"hw": {"gpu": "H100", "num_gpus": 32}, "parallel": {"ep": 16}}

    def exchanged(**model: str) -> float:
        work = read_workload({**_EXPERTS, **across, "model": {**_EXPERTS["model"], **model}})
        return exchange_us(work, _NETWORK)

    rows = 8192 * 4 * 2048 * 2
    assert exchanged(dispatcher="alltoall") == pytest.approx(2 * rows / 2)
    assert exchanged() == exchanged(dispatcher="flex") == pytest.approx(2 * rows * (1 - 0.5**4) / 4)


def test_quantized_experts_are_padded_by_a_copy_where_the_dispatcher_does_not() -> None:
    work = read_workload({**_EXPERTS, "train": {"gbs": 32, "mbs": 1, "precision": "fp8"}})
    device = find_device("H100")
    plain = device.efficiency("megatron-core")
    padding = dataclasses.replace(plain, dispatch_fraction=0.5)
    kind = work.model.layers[0]
    copied, sent = (widening(work, device, efficiency, kind).beside for efficiency in (plain, padding))
    passes_us = 4 * work.routed_rows * 2048 * 2 / (device.memory_bandwidth_gb_per_s * 1e3 * plain.memory_fraction)
    assert copied.forward_us - sent.forward_us == pytest.approx(passes_us)
    assert copied.input_gradient_us - sent.input_gradient_us == pytest.approx(passes_us)


def test_mxfp8_recipes_hide_the_exchanges_by_default_where_megatron_can() -> None:
    def hides(parallel: dict[str, object] | None = None, **train: object) -> bool:
        told = {"gbs": 32, "mbs": 1, "precision": "mxfp8", **train}
        request = {**_EXPERTS, "hw": {"gpu": "GB200", "num_gpus": 16}, "parallel": {"ep": 8, **(parallel or {})}}
        return read_workload({**request, "train": told}).expert_overlap

    assert hides()
    assert hides({"pp": 2, "vpp": 2})
    assert not hides({"pp": 2})
    assert not hides(moe_a2a_overlap=False)
    assert not hides(overlap_grad_reduce=False)
    assert not hides(recompute="full")
    assert not hides(precision="bf16")


def test_sequence_parallelism_gathers_again_in_the_backward_pass_of_2021s_software_only() -> None:
    def backward_us(stack: str, sequence_parallel: bool) -> float:
        request = copy.deepcopy(_REQUEST)
        request["parallel"]["sp"] = sequence_parallel
        request["train"].update({"stack": stack, "recompute": "none"})
        work = read_workload(request)
        device = find_device("A100")
        efficiency = dataclasses.replace(device.efficiency(stack), launch_us=0.0, tensor_launch_us=0.0, corrections=())
        # Links so slow that nothing else counts.
        fabric = Fabric(
            devices_per_node=8,
            link_bytes_per_us=1e-3,
            link_latency_us=0.0,
            inter_bytes_per_us=1.0,
            inter_latency_us=0,
            exchange_bytes_per_us=1.0,
        )
        return layer_time(work, device, efficiency, fabric).backward_us

    assert backward_us("megatron-2021", True) / backward_us("megatron-2021", False) == pytest.approx(1.5, rel=1e-3)
    assert backward_us("megatron-core", True) / backward_us("megatron-core", False) == pytest.approx(1.0, rel=1e-3)


def test_experts_with_few_tokens_share_the_waves_of_one_kernel() -> None:
    device = find_device("H100")
    efficiency = device.efficiency("megatron-core")
    alone = product_us(device, efficiency, 128, 2048, 2048)
    assert product_us(device, efficiency, 128, 2048, 2048, copies=4) < 3 * alone
    assert product_us(device, efficiency, 128, 2048, 2048, copies=4) >= alone


_EXPERTS = {
    "model": {
        "type": "moe",
        "num_layers": 8,
        "hidden": 2048,
        "heads": 32,
        "kv_heads": 4,
        "head_size": 64,
        "ffn": 2048,
        "seq": 8192,
        "swiglu": True,
        "num_experts": 16,
        "topk": 4,
    },
    "hw": {"gpu": "H100", "num_gpus": 8},
    "parallel": {"ep": 8},
    "train": {"gbs": 32, "mbs": 1},
}


def _experts_ms(section: str, train: dict[str, object] | None = None, **values: object) -> float:
    request = {**_EXPERTS, section: {**_EXPERTS[section], **values}}
    work = read_workload({**request, "train": {**request["train"], **(train or {})}})
    return step_ms(work)


def test_windowed_attention_saves_time_in_the_layers_that_have_it() -> None:
    plain, half, all_layers = (_experts_ms("model", window=128, windowed_share=share) for share in (0.0, 0.5, 1.0))
    assert all_layers < half < plain == _experts_ms("model")
    assert half == pytest.approx((all_layers + plain) / 2, rel=0.02)
    assert _experts_ms("model", window=128) == all_layers
    assert _experts_ms("model", window=8192) == plain


def test_biases_and_clamps_of_experts_take_passes_over_the_routed_rows() -> None:
    device = find_device("H100")
    rows = 8192 * 4
    passes_ms = 8 * 4 * rows * 2048 * 2 / (device.memory_bandwidth_gb_per_s * 1e6)
    passes_ms /= device.efficiency("megatron-core").memory_fraction
    plain = _experts_ms("model")
    assert _experts_ms("model", expert_bias=True) - plain == pytest.approx((14 + 20) * passes_ms, rel=0.02)
    assert _experts_ms("model", expert_clamp=True) == plain  # the fused kernel clamps, too
    unfused = _experts_ms("model", expert_clamp=True, train={"bias_activation_fusion": False})
    assert unfused - plain == pytest.approx(2 * (4 + 5) * passes_ms, rel=0.02)


def test_exchanges_of_tokens_are_hidden_by_computation_as_far_as_it_lasts() -> None:
    shown, hidden = (_experts_ms("train", moe_a2a_overlap=value) for value in (False, True))
    assert hidden < shown == _experts_ms("train")
    slow = {"hw": {"gpu": "H100", "num_gpus": 32, "inter_node_gbps": 100}, "parallel": {"ep": 16}}
    across = {
        value: read_workload({**_EXPERTS, **slow, "train": {"gbs": 32, "mbs": 1, "moe_a2a_overlap": value}})
        for value in (False, True)
    }
    device = find_device("H100")
    assert step_ms(across[True], device) > 0.5 * step_ms(across[False], device)


def test_grouped_products_of_experts_take_longer_by_the_factor_of_the_device() -> None:
    device = find_device("H100")
    changed = dataclasses.replace(device.efficiency("megatron-core"), expert_fraction=1.0)
    fast = dataclasses.replace(device, efficiencies={"megatron-core": changed})
    work = read_workload(_EXPERTS)
    assert step_ms(work, device) > 1.15 * step_ms(work, fast)
    dense = {**_REQUEST, "hw": {"gpu": "H100", "num_gpus": 8}}
    one_each = {**_EXPERTS, "model": {**_EXPERTS["model"], "num_experts": 8}}
    for request in (dense, one_each):
        assert step_ms(read_workload(request), device) == step_ms(read_workload(request), fast)


def test_the_overlap_of_gradients_in_a_request_overrides_that_of_the_device() -> None:
    overlapped, plain = (_experts_ms("train", overlap_grad_reduce=value) for value in (True, False))
    assert overlapped < plain
    assert _experts_ms("train") == pytest.approx(overlapped, rel=0.01)  # runs on H100 overlapped


def test_collectives_of_tensor_parallelism_show_less_where_they_overlap() -> None:
    overlapped, plain = (_ms(train={"tp_comm_overlap": value}) for value in (True, False))
    assert overlapped < plain == _ms()  # runs on A100 did not overlap
    alone = {"tp": 1, "pp": 2}
    assert _ms(parallel=alone, train={"tp_comm_overlap": True}) == _ms(parallel=alone)


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("model", {"window": 128, "windowed_share": 2}, "from 0 to 1"),
        ("model", {"windowed_share": 0.5}, "model.window is missing"),
        ("train", {"attention": "flash"}, "must be fused or unfused"),
    ],
)
def test_contradicting_requests_are_refused(section: str, values: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _experts_ms(section, **values)
