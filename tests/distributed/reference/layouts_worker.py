"""One launch, many layouts: every layout starts from one checkpoint and prints its losses and gradient norms as JSON.

``torchrun --nproc_per_node 4 layouts_worker.py <folder>``
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import mindspeed_autoparallel  # before megatron

assert mindspeed_autoparallel.__version__
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    get_num_microbatches,
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from mindspeed_autoparallel.patching import ENGINE  # noqa: E402
from mindspeed_autoparallel.runtime.features.data_balance import entry as data_balance  # noqa: E402
from mindspeed_autoparallel.runtime.features.data_balance.stepping import MicrobatchOrder  # noqa: E402
from mindspeed_autoparallel.runtime.profiling.measure.relayout import tear_down  # noqa: E402
from mindspeed_autoparallel.runtime.state import of_process  # noqa: E402
from reference_vlm.configuration import describe_model, read_data  # noqa: E402
from reference_vlm.data.batches import MicrobatchStream, StreamOptions  # noqa: E402
from reference_vlm.data.rearrange import make_rearrangement  # noqa: E402
from reference_vlm.data.records import read_records  # noqa: E402
from reference_vlm.data.tokens import ByteTokenizer  # noqa: E402
from reference_vlm.model.checks import check_layers, check_parameters  # noqa: E402
from reference_vlm.model.vlm import VisionLanguageModel, current_chunk  # noqa: E402
from reference_vlm.pretrain_vlm import Trainer  # noqa: E402

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "qwen2vl_tiny"
VOCABULARY = 512

Values = dict[str, Any]


def example_model(**changes: Any) -> Values:
    """model.json of the tiny example; ``vit``/``llm``/``audio`` are layers per stage, the rest as named."""
    values: Values = json.loads((EXAMPLE / "model.json").read_text())
    vision, text = values["image_encoder"]["vision_encoder"], values["text_decoder"]
    vision["pipeline_num_layers"] = changes.get("vit", [4])
    text["pipeline_num_layers"] = changes.get("llm", [4])
    vision.update(changes.get("vision", {}))
    text.update(changes.get("text", {}))
    values["image_encoder"]["vision_projector"].update(changes.get("projector", {}))
    if "audio" in changes:
        values |= {"audio_token_id": 500, "audio_start_token_id": 498, "audio_end_token_id": 499}
        values["audio_encoder"] = {
            "audio_encoder": {
                "num_layers": 2,
                "hidden_size": 32,
                "ffn_hidden_size": 64,
                "num_attention_heads": 4,
                "num_mel_bins": 16,
                "n_window": 10,
                "activation_func": "gelu",
                "pipeline_num_layers": changes["audio"],
            }
        }
    return values


# Layouts that share a "family" start from the same checkpoint and must agree.
FROZEN = {"vision": {"freeze": True}}
TIED = {"text": {"untie_embeddings_and_output_weights": False}}
WINDOWS = {
    "vision": {
        "window_size": 56,
        "fullatt_block_indexes": [1, 3],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": "silu",
    }
}
FULL = {"recompute_granularity": "full", "recompute_method": "block"}
LAYOUTS: dict[str, Values] = {
    "plain/dp4": {},
    "plain/tp2-sp-pp2": {"tp": 2, "pp": 2, "sp": True, "vit": [2, 2], "llm": [0, 4]},
    "plain/pp2-recompute": {
        "pp": 2,
        "vit": [3, 1],
        "llm": [0, 4],
        "vision": {**FULL, "recompute_num_layers": [2, 0]},
        "text": {**FULL, "recompute_num_layers": [0, 3]},
    },
    "plain/pp2-distributed-optimizer": {"pp": 2, "vit": [4, 0], "llm": [2, 2], "distributed_optimizer": True},
    "plain/cp2-pp2": {"cp": 2, "pp": 2, "vit": [3, 1], "llm": [0, 4]},
    "plain/cp2-tp2-sp": {"cp": 2, "tp": 2, "sp": True},
    "frozen/dp4": {**FROZEN},
    "frozen/pp4": {"pp": 4, "vit": [2, 2, 0, 0], "llm": [0, 1, 1, 2], **FROZEN},
    "everything but text frozen/dp4": {**FROZEN, "projector": {"freeze": True}},
    "everything but text frozen/pp4": {
        "pp": 4,
        "vit": [2, 2, 0, 0],
        "llm": [0, 0, 2, 2],
        **FROZEN,
        "projector": {"freeze": True},
    },
    "tied/dp4": {**TIED},
    "tied/pp4": {"pp": 4, "vit": [2, 2, 0, 0], "llm": [0, 2, 1, 1], **TIED},
    "windows/dp4": {**WINDOWS},
    "windows/tp2-pp2": {"tp": 2, "pp": 2, "vit": [2, 2], "llm": [0, 4], **WINDOWS},
    "audio/dp4": {"audio": [2], "data": "tones.json"},
    "audio/tp2-pp2": {"tp": 2, "pp": 2, "vit": [3, 1], "audio": [1, 1], "llm": [0, 4], "data": "tones.json"},
}


REARRANGED = {"ten", "pairs", "tokens"}
"""Families of eight microbatches, whose samples are rearranged: two steps, or ten where words of the command line choose
them. The others train two steps of four microbatches, one per stage of PP4."""
BALANCED = {"balance": True}
"""By the reference training's own stream."""
EXCHANGED = {"exchange": True}
"""By the flag for any host: whole microbatches."""
PACKED = {"size": 2, "pack": True}
"""Two samples of a microbatch in one row, without padding between them."""
LAYOUTS |= {
    "ten/dp4": {},
    "ten/balanced, dp 4": {**BALANCED},
    "ten/balanced tp2-sp-dp2": {"tp": 2, "sp": True, **BALANCED},
    "ten/balanced pp2-vpp2": {"pp": 2, "vit": [[2, 1], [1, 0]], "llm": [[0, 0], [1, 3]], **BALANCED},
    "ten/balanced cp2-dp2": {"cp": 2, **BALANCED},
    "ten/exchanged, dp 4": {**EXCHANGED},
    "ten/exchanged pp2-vpp2": {"pp": 2, "vit": [[2, 1], [1, 0]], "llm": [[0, 0], [1, 3]], **EXCHANGED},
}
BY_TOKEN = {"size": 3, "per_token_loss": True, "uneven": True}
FILLED = {**BY_TOKEN, "pack": True, "balance": True, "pack_length": 150}
"""Any number of samples in a row, up to that length: a batch given to replicas by work."""
LAYOUTS |= {
    "pairs/dp4": {"size": 2},
    "pairs/packed, dp 4": {**PACKED},
    "tokens/dp4": {**BY_TOKEN},
    "tokens/filled pp2-vpp2": {"pp": 2, "vit": [[2, 1], [1, 0]], "llm": [[0, 0], [1, 3]], **FILLED},
    "pairs/packed cp2-tp2-sp": {"cp": 2, "tp": 2, "sp": True, **PACKED},
}
ON_REQUEST: dict[str, Values] = {
    # Their sizes are also those of other families: "frozen", "tied", "windows", "ten" and "audio".
    "plain/tp2-dp2": {"tp": 2},
    "plain/pp4": {"pp": 4, "vit": [3, 1, 0, 0], "llm": [0, 0, 1, 3]},
    "plain/tp2-pp2": {"tp": 2, "pp": 2, "vit": [4, 0], "llm": [1, 3]},
    "plain/cp2-dp2": {"cp": 2},
    "plain/pp2-vpp2": {"pp": 2, "vit": [[2, 1], [1, 0]], "llm": [[0, 0], [1, 3]]},
    "audio/pp4": {"pp": 4, "vit": [2, 2, 0, 0], "audio": [2, 0, 0, 0], "llm": [0, 0, 2, 2], "data": "tones.json"},
    "ten/balanced tp2-dp2": {"tp": 2, **BALANCED},
    "ten/balanced pp2-dp2": {"pp": 2, "vit": [3, 1], "llm": [0, 4], **BALANCED},
    "ten/balanced pp2-distributed-optimizer": {
        "pp": 2,
        "vit": [4, 0],
        "llm": [2, 2],
        "distributed_optimizer": True,
        **BALANCED,
    },
    "ten/balanced pp4": {"pp": 4, "vit": [3, 1, 0, 0], "llm": [0, 0, 1, 3], **BALANCED},
    "ten/exchanged tp2-dp2": {"tp": 2, **EXCHANGED},
    "ten/exchanged tp2-sp-dp2": {"tp": 2, "sp": True, **EXCHANGED},
    "ten/exchanged cp2-dp2": {"cp": 2, **EXCHANGED},
    "ten/exchanged pp2-dp2": {"pp": 2, "vit": [3, 1], "llm": [0, 4], **EXCHANGED},
    "ten/exchanged pp2-distributed-optimizer": {
        "pp": 2,
        "vit": [4, 0],
        "llm": [2, 2],
        "distributed_optimizer": True,
        **EXCHANGED,
    },
    "ten/exchanged pp4": {"pp": 4, "vit": [3, 1, 0, 0], "llm": [0, 0, 1, 3], **EXCHANGED},
    "pairs/packed tp2-dp2": {"tp": 2, **PACKED},
    "pairs/packed tp2-sp-pp2": {"tp": 2, "pp": 2, "sp": True, "vit": [2, 2], "llm": [0, 4], **PACKED},
    "pairs/packed pp4": {"pp": 4, "vit": [3, 1, 0, 0], "llm": [0, 0, 1, 3], **PACKED},
    "pairs/packed pp2-vpp2": {"pp": 2, "vit": [[2, 1], [1, 0]], "llm": [[0, 0], [1, 3]], **PACKED},
    "pairs/packed pp2-recompute": {
        "pp": 2,
        "vit": [3, 1],
        "llm": [0, 4],
        "vision": {**FULL, "recompute_num_layers": [2, 0]},
        "text": {**FULL, "recompute_num_layers": [0, 3]},
        **PACKED,
    },
    "pairs/packed pp2-distributed-optimizer": {
        "pp": 2,
        "vit": [4, 0],
        "llm": [2, 2],
        "distributed_optimizer": True,
        **PACKED,
    },
    "pairs/packed cp2-dp2": {"cp": 2, **PACKED},
    "pairs/packed cp2-pp2": {"cp": 2, "pp": 2, "vit": [3, 1], "llm": [0, 4], **PACKED},
    "pairs/packed cp4": {"cp": 4, **PACKED},
    "tokens/filled, dp 4": {**FILLED},
    "tokens/filled tp2-dp2": {"tp": 2, **FILLED},
    "tokens/filled tp2-sp-pp2": {"tp": 2, "pp": 2, "sp": True, "vit": [2, 2], "llm": [0, 4], **FILLED},
    "tokens/filled pp4": {"pp": 4, "vit": [3, 1, 0, 0], "llm": [0, 0, 1, 3], **FILLED},
    "tokens/filled pp2-distributed-optimizer": {
        "pp": 2,
        "vit": [4, 0],
        "llm": [2, 2],
        "distributed_optimizer": True,
        **FILLED,
    },
    "tokens/filled cp2-dp2": {"cp": 2, **FILLED},
    "tokens/filled cp2-tp2-sp": {"cp": 2, "tp": 2, "sp": True, **FILLED},
    "tokens/filled cp4": {"cp": 4, **FILLED},
}
"""Run only where words of the command line choose them."""


def run_layout(name: str, layout: Values, folder: Path, num_steps: int) -> Values:
    """Build, load, train. The first layout of a family writes its checkpoint."""
    tensor, pipeline, context = layout.get("tp", 1), layout.get("pp", 1), layout.get("cp", 1)
    model = describe_model(example_model(**layout), EXAMPLE / "model.json", pipeline)
    virtual = model.virtual_size if model.virtual_size > 1 else None
    trainer = Trainer(model)
    parallel_state.initialize_model_parallel(
        tensor, pipeline, virtual, context_parallel_size=context, get_embedding_ranks=trainer.embedding_ranks
    )
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(123)
    base = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        context_parallel_size=context,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        sequence_parallel=layout.get("sp", False),
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )
    base.variable_seq_lengths = pipeline > 1
    base.calculate_per_token_loss = layout.get("per_token_loss", False)
    if virtual:
        base.overlap_p2p_comm, base.batch_p2p_comm = True, False
    chunks = []
    for index in range(virtual or 1):
        if virtual:
            parallel_state.set_virtual_pipeline_model_parallel_rank(index)
        chunk = VisionLanguageModel(base, model, VOCABULARY, current_chunk(index))
        check_parameters(chunk, model, VOCABULARY)
        chunks.append(chunk)
    check_layers(chunks, model)
    if virtual:
        parallel_state.set_virtual_pipeline_model_parallel_rank(0)
    exchange_weights(chunks, folder / name.split("/")[0].replace(" ", "_"), first=name.endswith("dp4"))
    distributed_optimizer = layout.get("distributed_optimizer", False)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed_optimizer, overlap_grad_reduce=distributed_optimizer
    )
    wrapped = [DistributedDataParallel(config=base, ddp_config=ddp, module=chunk) for chunk in chunks]
    base.finalize_model_grads_func = finalize_model_grads
    if distributed_optimizer:
        base.no_sync_func = wrapped[0].no_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=distributed_optimizer), wrapped
    )
    iterators = [microbatches(model, layout, folder) for _ in chunks]
    set_exchange(layout)
    steps = [train_step(base, wrapped, optimizer, iterators, trainer) for _ in range(num_steps)]
    dist.barrier()
    # Megatron only forgets its groups: after some twenty layouts their threads would have the cores to themselves.
    tear_down(parallel_state)
    unset_num_microbatches_calculator()
    losses = [step["loss"] for step in steps]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, losses)
    last_stage = [values for values in gathered if values[0] is not None]
    return {"losses": last_stage[0], "norms": [step["norm"] for step in steps]}


def exchange_weights(chunks: list[Any], folder: Path, *, first: bool) -> None:
    """Write the family's checkpoint, or load it under this layout."""
    sharded: Values = {}
    for chunk in chunks:
        # Megatron names the chunks apart; the keys inside the checkpoint are the same.
        sharded[f"model{len(sharded)}"] = chunk.sharded_state_dict()
    if first:
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(sharded, str(folder))
        return
    loaded = dist_checkpointing.load(sharded, str(folder))
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{index}"])


def uneven_records(folder: Path) -> Path:
    """Write the example's records, two short texts before each of them."""
    records = []
    for place, record in enumerate(json.loads((EXAMPLE / "data" / "pictures.json").read_text())):
        for text in ("?" * (1 + place % 3), "and then?"):
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "ab"[place % 2]}]
            records.append({"messages": turns, "images": []})
        records.append(record)
    path = folder / f"uneven_{dist.get_rank()}.json"
    path.write_text(json.dumps(records))
    return path


def microbatches(model: Any, layout: Values, folder: Path) -> Any:
    data = copy.copy(read_data(EXAMPLE / "data.json"))
    file = EXAMPLE / "data" / layout.get("data", "pictures.json")
    if layout.get("uneven"):
        file = uneven_records(folder)
    object.__setattr__(data, "files", (file,))
    object.__setattr__(data, "folder", EXAMPLE / "data")
    size = parallel_state.get_data_parallel_world_size()
    samples = layout.get("size", 1)
    if not _calculator_ready():
        init_num_microbatches_calculator(0, None, layout["microbatches"] * samples, samples, size)
    return iter(
        MicrobatchStream(
            read_records(data),
            model,
            data,
            ByteTokenizer(),
            StreamOptions(
                size=samples,
                rank=parallel_state.get_data_parallel_rank(),
                num_ranks=size,
                start=0,
                seed=1,
                max_tokens=128,
                pad_to_longest=True,
                multiple=layout.get("tp", 1) * 2 * layout.get("cp", 1),
                is_packed=layout.get("pack", False),
            ),
            rearrangement=rearrangement(model, data, size, layout) if layout.get("balance") else None,
        )
    )


def set_exchange(layout: Values) -> None:
    """Switch the host's ``--data-balance`` on for this layout, as its entry does after the arguments are parsed."""
    arguments = argparse.Namespace(mm_model=str(EXAMPLE / "model.json"), data_balance=True, rank=dist.get_rank())
    of_process(MicrobatchOrder).work = None
    if layout.get("exchange"):
        data_balance.prepare(arguments)
        ENGINE.enable(["--data-balance"])


def rearrangement(model: Any, data: Any, num_ranks: int, layout: Values) -> Any:
    samples = layout.get("size", 1)
    arguments = argparse.Namespace(
        micro_batch_size=samples,
        calculate_per_token_loss=layout.get("per_token_loss", False),
        global_batch_size=layout["microbatches"] * samples,
        pack_samples=layout.get("pack", False),
        pack_length=layout.get("pack_length", 0),
        seq_length=128,
        log_interval=1,
        rank=1,
    )
    return make_rearrangement(arguments, model, data, ByteTokenizer(), num_ranks, False)


def _calculator_ready() -> bool:
    from megatron.core import num_microbatches_calculator

    return num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None


def train_step(base: Any, wrapped: list[Any], optimizer: Any, iterators: list[Any], trainer: Trainer) -> Values:
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=trainer.step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=wrapped if len(wrapped) > 1 else wrapped[0],
        num_microbatches=get_num_microbatches(),
        seq_length=128,
        micro_batch_size=1,
        forward_only=False,
    )
    loss = None
    if reports:
        total = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        loss = float(total[0] / total[1])
    _, norm, _ = optimizer.step()
    return {"loss": loss, "norm": float(norm)}


def main() -> None:
    dist.init_process_group("gloo")
    folder, chosen = Path(sys.argv[1]), sys.argv[2:]
    results = {}
    for name, layout in (LAYOUTS | (ON_REQUEST if chosen else {})).items():
        if not chosen or any(word in name for word in chosen):
            num_steps, num_microbatches = (10 if chosen else 2, 8) if name.split("/")[0] in REARRANGED else (2, 4)
            results[name] = run_layout(name, {**layout, "microbatches": num_microbatches}, folder, num_steps)
            if dist.get_rank() == 0:
                (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
