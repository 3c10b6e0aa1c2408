"""What the models of switches rest on, asked of Megatron itself: its checks of flags, and the figures in its code."""

import argparse
import os
import subprocess
from pathlib import Path

import pytest
from forked_python import forked_python

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.megatron

FSDP = "distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py"
OFFLOAD = "pipeline_parallel/fine_grained_activation_offload.py"
PARSE = """
import sys
import mindspeed_autoparallel
from megatron.training.arguments import parse_args
from mindspeed_autoparallel.runtime.features.auto_tuning.argv import illegal, with_environment
import json
sys.argv = ["x", "--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "128",
    "--max-position-embeddings", "128", "--micro-batch-size", "1", "--global-batch-size", "16", "--bf16", "--mock-data",
    "--tokenizer-type", "NullTokenizer", "--vocab-size", "512", "--lr", "1e-3", "--train-iters", "4",
    "--num-experts", "4", "--moe-token-dispatcher-type", "alltoall"]
arguments = parse_args()
answers = []
for values, environment in json.loads(sys.stdin.read()):
    with with_environment(environment):
        answers.append(illegal(arguments, values, 8))
print("ANSWERS" + json.dumps(answers))
"""


def cores():
    """Folders of megatron.core: the environment's own release and the older ones."""
    import megatron.core

    found = {"own": Path(megatron.core.__file__).parent}
    for name in ("MEGATRON_CORE_0_12", "MEGATRON_CORE_0_16"):
        if name in os.environ:
            found[name] = Path(os.environ[name]) / "megatron" / "core"
    return found


def answers(questions):
    import json

    pytest.importorskip("megatron.training")
    environment = {**os.environ, "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu"}
    done = subprocess.run(
        [forked_python(), "-c", PARSE],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=True,
    )
    return json.loads(done.stdout.split("ANSWERS")[-1])


SHARDED = {
    "use_megatron_fsdp": True,
    "gradient_accumulation_fusion": False,
    "ckpt_format": "fsdp_dtensor",
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "suggested_communication_unit_size": 1000,
    "megatron_fsdp_main_grads_dtype": "fp32",
}
UNSET = {"CUDA_DEVICE_MAX_CONNECTIONS": ""}


def test_megatron_takes_the_flags_of_every_switch_and_refuses_fsdp_without_its_variable():
    taken = answers(
        [
            [{**SHARDED, "data_parallel_sharding_strategy": "optim_grads"}, UNSET],
            [{**SHARDED, "data_parallel_sharding_strategy": "optim_grads_params"}, UNSET],
            [{"tp_comm_overlap": True, "tensor_model_parallel_size": 2, "sequence_parallel": True}, {}],
            [{"overlap_moe_expert_parallel_comm": True, "expert_model_parallel_size": 2}, {}],
            [
                {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn", "attn_proj"]},
                {"NVTE_CPU_OFFLOAD_V1": "1"},
            ],
            [{"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}, {}],
            [SHARDED, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}],
            [{"tp_comm_overlap": True, "tensor_model_parallel_size": 2, "sequence_parallel": False}, {}],
        ]
    )
    assert taken[:6] == [""] * 6
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in taken[6]
    assert taken[7]


def test_fsdp_communicates_at_least_a_billion_elements_and_gathers_half_of_it_ahead():
    from mindspeed_autoparallel.spec import Sharding

    checked = 0
    for folder in cores().values():
        if (folder / FSDP).exists():
            text = (folder / FSDP).read_text()
            assert "1_000_000_000, suggested_communication_unit_size" in " ".join(text.split())
            assert "suggested_communication_unit_size // 2" in text
            checked += 1
    assert checked
    assert Sharding(parameters=True).communication_unit == 1_000_000_000


def test_modules_that_can_be_offloaded_and_the_least_size_are_as_modelled():
    from mindspeed_autoparallel.cost.overlap import ATTENTION, EXPERTS, LayerShape, offloaded

    for name, folder in cores().items():
        text = (folder / "transformer" / "transformer_config.py").read_text()
        has = "fine_grained_activation_offloading: bool" in text
        assert has == (folder / OFFLOAD).exists() == (name != "MEGATRON_CORE_0_12")
        if has:
            assert all(f'"{module}"' in text for module in ATTENTION + EXPERTS)
            assert "min_offloaded_tensor_size: int = 1024 * 1024" in text
    least = 1024 * 1024
    assert offloaded(LayerShape(query=least, key_value=least), ATTENTION).moved_bytes
    assert not offloaded(LayerShape(query=least - 1, key_value=least - 1), ATTENTION).moved_bytes


@pytest.mark.parametrize("chunks", [2, 3])
def test_warm_up_of_paired_microbatches_is_megatrons(chunks):
    pytest.importorskip("megatron.core.pipeline_parallel.combined_1f1b")
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

    from mindspeed_autoparallel.schedule import make_program

    def group(size, rank):
        return argparse.Namespace(size=lambda: size, rank=lambda: rank)

    communicator = argparse.Namespace(pp_group=group(4, 0), virtual_pipeline_model_parallel_size=chunks)
    for number in (4, 8, 16):
        _, _, warm_up, _ = get_pp_rank_microbatches(
            number, chunks, 4, overlap_moe_expert_parallel_comm=True, p2p_communicator=communicator
        )
        kinds = "".join(action.kind for action in make_program("interleaved", 4, number, chunks, 0, True)[0])
        # The first pair's forward comes right behind the warm-up.
        assert len(kinds) - len(kinds.lstrip("F")) == min(warm_up + 1, number * chunks)
