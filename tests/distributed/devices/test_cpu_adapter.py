"""Unmodified Megatron on CPU and gloo: every layout trains like the single process, on every supported release."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
from ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.torch, pytest.mark.megatron]

WORKER = Path(__file__).with_name("gpt_layouts.py")
REFERENCES = {
    "dense": [
        "tp2-pp2",
        "tp2-sp-dp2",
        "dp4-distributed-optimizer",
        "dp4-distributed-optimizer-overlapped",
        "pp2-vpp2-dp2",
        "tp2-pp2-full-recompute",
        "tp2-selective-recompute",
        "tp2-sp-output-recompute",
        "packed-tp2-sp-dp2",
        "packed-cp2-tp2",
    ],
    "dense-eight": ["pp2-vpp2-dp2-groups-of-4"],
    "dense-rms-norm": ["tp2-sp-rms-norm"],
    "dense-tied": ["tp2-pp2-tied"],
    "moe": ["moe-ep2-pp2-alltoall", "moe-ep2-tp2-sp-allgather", "moe-ep4-tp2-etp1-alltoall", "moe-ep2-tp2-etp1-pp2"],
    "bf16": ["bf16-tp2-pp2-distributed-optimizer"],
}
"""Single-process case -> layouts on four ranks that must equal it."""
BETWEEN = {
    "tp2-sp-dp2",
    "dp4-distributed-optimizer-overlapped",
    "pp2-vpp2-dp2-groups-of-4",
    "tp2-pp2-full-recompute",
    "tp2-sp-output-recompute",
    "packed-cp2-tp2",
    "tp2-pp2-tied",
    "moe-ep2-pp2-alltoall",
    "moe-ep4-tp2-etp1-alltoall",
    "bf16-tp2-pp2-distributed-optimizer",
}
"""Of a release between the oldest and the newest, which run all: one of every kind."""
SINCE_0_13 = {"tp2-sp-output-recompute", "checkpoint"}
BF16_TOLERANCE, TOLERANCE = 5e-3, 1e-5


def test_sent_data_arrives_although_its_memory_is_freed():
    """Megatron's interleaved schedule up to 0.18 frees what it sends before it waits: a peer got other numbers."""
    results = run_ranks(2, Path(__file__).with_name("freed_sends.py"))
    assert results[1].result == {"wrong": 0}


def gather_unequal(sizes):
    from mindspeed_autoparallel.runtime.devices.selection import prepare_for_megatron

    prepare_for_megatron()

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    gathered = [torch.zeros(size, 2) for size in sizes]
    works = [
        dist.all_gather(gathered, torch.full((sizes[rank], 2), rank + 1.0), async_op=later) for later in (False, True)
    ]
    works[1].wait()
    return [works[0] is None, *(part.tolist() for part in gathered)]


def gather_stacked():
    from mindspeed_autoparallel.runtime.devices.selection import prepare_for_megatron

    prepare_for_megatron()

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    stacked = torch.zeros(2, 3, 2)
    dist.all_gather_into_tensor(stacked, torch.full((3, 2), dist.get_rank() + 1.0), async_op=True).wait()
    scattered = torch.zeros(3, 2)
    dist.reduce_scatter_tensor(output=scattered, input=stacked)
    return [*stacked[:, 0, 0].tolist(), *scattered[:, 0].tolist()]


def test_ranks_gather_into_a_stack_and_scatter_one():
    """MindSpeed-LLM's Mamba does with context parallelism; gloo takes tensors with the same axes alone."""
    first, second = (rank.result for rank in run_ranks(2, gather_stacked))
    assert (first, second) == ([1.0, 2.0, 2.0, 2.0, 2.0], [1.0, 2.0, 4.0, 4.0, 4.0])


def test_ranks_gather_tensors_of_unequal_sizes():
    """Accelerators' libraries do; experts that tensor ranks share gather each other's tokens so. gloo refuses them."""
    for rank in run_ranks(3, gather_unequal, [2, 0, 1]):
        assert rank.result == [True, [[1.0, 1.0]] * 2, [], [[3.0, 3.0]]]


def test_every_layout_trains_like_one_process(megatron_release):
    (alone,) = run_ranks(1, WORKER, *REFERENCES, python_path=megatron_release, timeout_s=300)
    between = alone.result["release"].startswith("0.16")
    groups = {
        reference: [layout for layout in group if not between or layout in BETWEEN]
        for reference, group in REFERENCES.items()
    }
    layouts = [layout for group in groups.values() for layout in group]
    ranks = run_ranks(4, WORKER, *layouts, python_path=megatron_release, timeout_s=500)
    old = alone.result["release"].startswith("0.12")
    for reference, group in groups.items():
        expected = alone.result["cases"][reference]
        assert expected["losses"][0] != expected["losses"][1], "it trains"
        for layout in group:
            results = [rank.result["cases"][layout] for rank in ranks]
            if old and layout in SINCE_0_13:
                assert results == [None] * 4
                continue
            tolerance = BF16_TOLERANCE if reference == "bf16" else TOLERANCE
            for result in results:
                assert result["norms"] == pytest.approx(expected["norms"], rel=tolerance), layout
            losses = [result["losses"] for result in results if result["losses"][0] is not None]
            assert losses == [pytest.approx(expected["losses"], rel=tolerance)] * len(losses), layout
            assert losses, layout
    # In a job of its own: behind many layouts, the process that Megatron spawns to save does not start.
    ranks = run_ranks(4, WORKER, "checkpoint", python_path=megatron_release, timeout_s=200)
    checkpoint = {"num_equal": 53, "num_parameters": 53}
    assert [rank.result["cases"]["checkpoint"] for rank in ranks] == [None if old else checkpoint] * 4
