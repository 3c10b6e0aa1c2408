"""Every file a user hands over, with the command that reads it: a folder of good files, which of them to change, how."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(Path(__file__).parent)]

import mutations  # noqa: E402
import shell_grammar  # noqa: E402

PLANNED = ("--nnodes", "1", "--nproc-per-node", "2", "--global-batch-size", "4", "--time-limit-s", "2")
Mutation = Callable[[bytes, random.Random], bytes]
JSON: Mutation = lambda content, source: mutations.mutated_json(content.decode(), source)
YAML: Mutation = lambda content, source: mutations.mutated_yaml(content.decode(), source)
SHELL: Mutation = lambda content, source: shell_grammar.mutated_script(content.decode(), source)


@dataclass(frozen=True)
class Target:
    """A command and the file of its folder that is changed; paths are relative to the folder."""

    name: str
    seeds: str
    """Which folder of good files."""
    file: str
    mutation: Mutation
    argv: tuple[str, ...]
    """``call:module:function`` instead of a command: a reader of the reference training, called with the file."""


def targets() -> list[Target]:
    """All of them; a run takes them in turn."""
    plan = ("plan", *PLANNED, "--num-workers", "1", "--json", "--out", "out")
    split = ("split", "--pipeline-size", "2", "--num-microbatches", "4", "--memory-limit-mib", "900", "--json")
    to_mm = ("convert", "hf-to-mm", "hf", "out")
    back = ("--hf-dir", "hf", "--json")
    reference = "call:reference_vlm.configuration"
    return [
        Target("profile, plan", "plans", "profile.json", JSON, (*plan, "--profile", "profile.json")),
        Target("profile, split", "plans", "profile.json", JSON, (*split, "--profile", "profile.json")),
        Target("MindSpeed profile", "plans", "model_profile.json", JSON, (*split, "--profile", "model_profile.json")),
        Target("plan, simulate", "plans", "plan.json", JSON, ("simulate", "--plan", "plan.json", "--trace", "out.json")),
        Target("plan, report", "plans", "plan.json", JSON, ("report", "--plan", "plan.json", "--page", "out.html")),
        Target("plan, convert", "weights", "plan.json", JSON, (*to_mm, "--plan", "plan.json")),
        Target("requests", "shapes", "requests.json", JSON, ("predict", "--request", "requests.json", "--json")),
        Target("request", "shapes", "request.json", JSON, ("tune", "--request", "request.json", "--json")),
        Target("rows", "shapes", "rows.json", JSON, ("scoreboard", "rows.json", "--json")),
        Target(
            "catalogue", "shapes", "device.json", JSON, ("predict", "--request", "own.json", "--device-file", "device.json")
        ),
        Target(
            "shapes, plan", "shapes", "model.json", JSON,
            (*plan, "--profile-source", "analytic", "--model", "model.json", "--device", "H100"),
        ),
        Target(
            "Hugging Face sizes, plan", "shapes", "config.json", JSON,
            (*plan, "--profile-source", "analytic", "--model", "config.json", "--device", "H100", "--seq-length", "512"),
        ),
        Target(
            "Megatron sizes, plan", "shapes", "megatron.json", JSON,
            (*plan, "--profile-source", "analytic", "--model", "megatron.json", "--device", "H100"),
        ),
        Target("knowledge import", "knowledge", "export.json", JSON, ("knowledge", "import", "out.sqlite", "export.json")),
        Target("knowledge base", "knowledge", "base.sqlite", mutations.mutated_bytes, ("knowledge", "show", "base.sqlite")),
        Target("YAML", "shapes", "operators.yaml", YAML, ("operators", "--layers", "2", "--config", "operators.yaml")),
        Target("LLaVA", "data", "llava.json", JSON,
               ("data", "llava-to-mllm", "llava.json", "--images", ".", "--output", "out.json")),
        Target("launch script", "data", "train.sh", mutations.mutated_bytes, ("doctor", "--script", "train.sh", "--json")),
        Target("script grammar", "data", "train.sh", SHELL, ("doctor", "--script", "train.sh", "--json")),
        Target("model.json", "data", "model.json", JSON, (f"{reference}.model:read_model", "model.json")),
        Target("data.json", "data", "data.json", JSON, (f"{reference}.data:read_data", "data.json")),
        Target("tools.json", "data", "tools.json", JSON, (f"{reference}.tools:read_tools", "tools.json")),
        Target("config.json", "weights", "hf/config.json", JSON, to_mm),
        Target("index", "weights", "hf/model.safetensors.index.json", JSON, to_mm),
        Target("safetensors", "weights", "hf/model-00001-of-*.safetensors", mutations.mutated_safetensors, to_mm),
        Target("rank file", "weights", "mm/release/mp_rank_00/model_optim_rng.pt", mutations.mutated_pickle,
               ("convert", "mm-to-hf", "mm", "out", *back)),
        Target("tracker", "weights", "mm/latest_checkpointed_iteration.txt", mutations.mutated_bytes,
               ("convert", "mm-to-hf", "mm", "out", *back)),
        Target("metadata", "weights", "dist/release/.metadata", mutations.mutated_pickle,
               ("convert", "mm-to-hf", "dist", "out", *back)),
        Target("distributed data", "weights", "dist/release/__0_0.distcp", mutations.mutated_pickle,
               ("convert", "mm-to-hf", "dist", "out", *back)),
        Target("common.pt", "weights", "dist/release/common.pt", mutations.mutated_pickle,
               ("convert", "resplit", "dist", "out", "--format", "torch_dist", *back)),
    ]  # fmt: skip


def make_seeds(folder: Path) -> None:
    """Write the good files; every target ends well with them."""
    for name in ("plans", "shapes", "knowledge", "data", "weights"):
        (folder / name).mkdir()
    _plans(folder / "plans")
    _shapes(folder / "shapes")
    _knowledge(folder / "knowledge")
    _data(folder / "data")
    _weights(folder / "weights")


def _plans(folder: Path) -> None:
    _write_plan(folder)
    block = {"fwd_time": 2.0, "bwd_time": 3.0, "act_mem": 10, "module_param": [5, 20, 10]}
    mindspeed = {
        **dict.fromkeys(("vit_pre", "vit", "vit_post", "llm_pre", "llm", "llm_post"), block),
        "image_encoder": {"vision_encoder": {"num_layers": 2}},
        "text_decoder": {"num_layers": 4, "hidden_size": 64, "seq_length": 128},
        "micro_batch_size": 1,
    }
    _write(folder / "model_profile.json", mindspeed)


def _write_plan(folder: Path) -> None:
    """Write profile.json of a model of two modules and the plan.json the planner makes of it."""
    from small_profile import small_profile

    from mindspeed_autoparallel.cli.main import main

    small_profile().write(folder / "profile.json")
    where = ("--out", str(folder / "planned"), "--profile", str(folder / "profile.json"))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = main(["plan", *PLANNED, "--num-workers", "1", *where])
    if code:
        raise SystemExit(f"the good profile ends with {code}")
    (folder / "planned" / "plan.json").rename(folder / "plan.json")
    shutil.rmtree(folder / "planned")


def _shapes(folder: Path) -> None:
    request = {
        "id": "a",
        "model": {"type": "gpt", "num_layers": 4, "hidden": 512, "heads": 8, "seq": 512},
        "hw": {"gpu": "A100-80GB", "num_gpus": 4, "gpus_per_node": 4},
        "parallel": {"tp": 2, "pp": 2},
        "train": {"gbs": 8, "mbs": 1, "recompute": "full"},
    }
    _write(folder / "requests.json", {"requests": [request, {**request, "id": "b"}]})
    _write(folder / "request.json", {**request, "parallel": {}})
    measured = {"step_time_ms": 100.0, "peak_gib": 4.0, "activations_gib": 1.0}
    _write(folder / "rows.json", {"rows": [{**request, "measured": measured}] * 3})
    catalogue = ROOT / "mindspeed_autoparallel" / "cost" / "catalogue_data"
    device = json.loads(next(path for path in sorted(catalogue.glob("*.json")) if "80" in path.name).read_text())
    _write(folder / "device.json", {**device, "name": "Own", "aliases": ["own"]})
    _write(folder / "own.json", {"requests": [{**request, "hw": {**request["hw"], "gpu": "Own"}}]})
    _write(folder / "model.json", {"num_layers": 4, "hidden": 512, "heads": 8, "seq": 512, "vocab": 1000})
    _write(
        folder / "config.json",
        {
            "model_type": "deepseek_v3", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
            "intermediate_size": 1024, "vocab_size": 1000, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 256, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 64,
            "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
            "num_nextn_predict_layers": 1,
        },
    )  # fmt: skip
    _write(
        folder / "megatron.json",
        {
            "num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "num_query_groups": 2, "seq_length": 512,
            "padded_vocab_size": 1024, "swiglu": True, "num_experts": 8, "moe_router_topk": 2,
            "moe_ffn_hidden_size": 256, "moe_layer_freq": "[0]*1+[1]*3", "moe_expert_capacity_factor": 1.5,
        },
    )  # fmt: skip
    (folder / "operators.yaml").write_text(
        "use_parallel: true\nparallel: {parallel_mode: 2, search_mode: recursive_programming}\n"
        "parallel_config: {mem_coeff: 0.1}\n"
    )


def _knowledge(folder: Path) -> None:
    from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase
    from mindspeed_autoparallel.profiles.knowledge.base import Operator, Sample, Signature, export_knowledge

    base = KnowledgeBase(folder / "base.sqlite")
    sample = Sample(median_us=2.0, p10_us=1.0, p90_us=3.0, num_runs=5, source="measured", measured_at=1.0)
    base.record(
        "cpu",
        "torch",
        [(Operator(name="aten.mm", signature=Signature.of_json([[4], {"map": {}}]), sizes=(4, 8)), sample)],
    )
    export_knowledge(base, folder / "export.json")


def _data(folder: Path) -> None:
    example = ROOT / "docs" / "examples" / "qwen2vl_tiny"
    for name in ("model.json", "data.json", "tools.json"):
        (folder / name).write_bytes((example / name).read_bytes())
    (folder / "train.sh").write_bytes((ROOT / "docs" / "examples" / "pretrain_qwen2vl.sh").read_bytes())
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]
    _write(folder / "llava.json", [{"id": "1", "image": "picture.jpg", "conversations": turns}] * 2)
    (folder / "picture.jpg").write_bytes(b"\xff\xd8\xff\xe0picture")


def _weights(folder: Path) -> None:
    from random_model import write_random_model

    from mindspeed_autoparallel.weights import conversion
    from mindspeed_autoparallel.weights.architecture import TEXT, read_architecture
    from mindspeed_autoparallel.weights.layouts import make_layout

    config = {
        "model_type": "qwen2_vl", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 30, "tie_word_embeddings": False,
        "vision_config": {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 4, "patch_size": 2},
    }  # fmt: skip
    write_random_model(folder / "hf", config, max_shard_bytes=8192)
    layout = make_layout(read_architecture(folder / "hf"), layers={}, tensor_sizes={TEXT: 1})
    conversion.huggingface_to_checkpoint(folder / "hf", folder / "mm", layout)
    conversion.huggingface_to_checkpoint(folder / "hf", folder / "dist", layout, file_format="torch_dist")
    _write_plan(folder)


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
