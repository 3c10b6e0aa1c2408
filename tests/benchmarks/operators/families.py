"""Capture, plan and run a small model of every family on four ranks, in train mode; prints a row per family.

Run: torchrun --nproc-per-node 4 tests/benchmarks/operators/families.py [NAME ..]; names with ``tv`` are torchvision's,
where it can be imported. Random weights from a configuration,
fp64, no download. Beside one process: the worst relative error of outputs and gradients, and whether the bytes that
were sent are those predicted, on random plans of a mesh of 4 and of 2 x 2, and on the exact plan (of more than 300
operators that of recursive programming).
"""

import random
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[2] / "distributed" / "operators"))

from plan_checks import COUNTER, compare, make_groups, random_plan  # noqa: E402

from mindspeed_autoparallel.operators.strategies import search_graph  # noqa: E402
from mindspeed_autoparallel.operators.torch.capture import capture_program  # noqa: E402

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 64, "rotary_dim": 4}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 1,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PICTURES = {"image_size": 32, "patch_size": 8, "num_channels": 3}
NO_TOKENS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def tokens(batch=4, length=8):
    return {"input_ids": torch.randint(3, 64, (batch, length))}


def both(batch=4, length=8):
    return {**tokens(batch, length), "decoder_input_ids": torch.randint(3, 64, (batch, length))}


def pictures(batch=4, size=32):
    return {"pixel_values": torch.randn(batch, 3, size, size, dtype=torch.float64)}


def text(config, model="AutoModelForCausalLM", inputs=tokens, **more):
    return lambda: build(config, model, {**SMALL, **more}, inputs)


def vision(config, model="AutoModelForImageClassification", size=32, **more):
    picked = {key: SMALL[key] for key in NO_TOKENS}
    return lambda: build(config, model, {**picked, **PICTURES, **more}, lambda: pictures(size=size))


def build(config, model, options, inputs):
    made = getattr(transformers, config)(**options)
    built = getattr(transformers, model)
    net = built.from_config(made) if hasattr(built, "from_config") else built(made)
    if hasattr(net, "set_experts_implementation"):
        net.set_experts_implementation("batched_mm")
    return net, inputs()


FAMILIES = {
    "llama": text("LlamaConfig"),
    "llama tied": text("LlamaConfig", tie_word_embeddings=True),
    "qwen2": text("Qwen2Config"),
    "qwen3": text("Qwen3Config"),
    "mistral": text("MistralConfig", sliding_window=4),
    "mixtral": text("MixtralConfig", **EXPERTS),
    "qwen3 moe": text("Qwen3MoeConfig", **EXPERTS),
    "gemma": text("GemmaConfig"),
    "gemma2": text("Gemma2Config"),
    "phi": text("PhiConfig"),
    "phi3": text("Phi3Config"),
    "olmo2": text("Olmo2Config"),
    "granite": text("GraniteConfig"),
    "starcoder2": text("Starcoder2Config"),
    "stablelm": text("StableLmConfig"),
    "cohere": text("CohereConfig"),
    "glm": text("GlmConfig"),
    "gpt2": text("GPT2Config", **GPT),
    "gpt neox": text("GPTNeoXConfig"),
    "gptj": text("GPTJConfig", **GPT),
    "opt": text("OPTConfig", ffn_dim=64, word_embed_proj_dim=32),
    "bloom": text("BloomConfig", n_layer=2, n_head=4),
    "falcon": lambda: build("FalconConfig", "AutoModelForCausalLM", {k: v for k, v in SMALL.items() if k != "head_dim"}, tokens),
    "bert": text("BertConfig", "AutoModelForMaskedLM"),
    "roberta": text("RobertaConfig", "AutoModelForMaskedLM"),
    "distilbert": text("DistilBertConfig", "AutoModelForMaskedLM", dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    "electra": text("ElectraConfig", "AutoModelForMaskedLM", embedding_size=32),
    "albert": text("AlbertConfig", "AutoModelForMaskedLM", embedding_size=32),
    "modernbert": text("ModernBertConfig", "AutoModelForMaskedLM", cls_token_id=1, sep_token_id=2, local_attention=4),
    "t5": text("T5Config", "AutoModelForSeq2SeqLM", both, **T5),
    "bart": text("BartConfig", "AutoModelForSeq2SeqLM", both, **BART),
    "vit": vision("ViTConfig"),
    "deit": vision("DeiTConfig"),
    "beit": vision("BeitConfig"),
    "dinov2": vision("Dinov2Config"),
    "swin": vision("SwinConfig", size=64, image_size=64, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4],
                   window_size=4, hidden_size=32, drop_path_rate=0.1),
    "convnext": vision("ConvNextConfig", size=64, hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, patch_size=4),
    "resnet": vision("ResNetConfig", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="bottleneck"),
    "mobilenet": vision("MobileNetV2Config", depth_multiplier=0.25, image_size=64, size=64),
    "regnet": vision("RegNetConfig", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], groups_width=8),
    "segformer": vision("SegformerConfig", size=64, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
                        hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4],
                        mlp_ratios=[2, 2]),
    "poolformer": vision("PoolFormerConfig", size=64, hidden_sizes=[16, 32], depths=[1, 1], num_encoder_blocks=2,
                         patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1]),
}  # fmt: skip


try:
    from torchvision_families import FAMILIES as PICTURE_FAMILIES
except ImportError:
    PICTURE_FAMILIES = {}
FAMILIES.update(PICTURE_FAMILIES)


class Flat(torch.nn.Module):
    """A model as a function of its tensors that gives its floating-point results alone."""

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values):
        made = self.model(**dict(zip(self.names, values, strict=True)), return_dict=True)
        return made.logits if hasattr(made, "logits") else made[0]


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    COUNTER.install()
    meshes = {(4,): make_groups((4,)), (2, 2): make_groups((2, 2))}
    for name in sys.argv[1:] or FAMILIES:
        torch.manual_seed(0)
        random.seed(0)
        started = time.process_time()
        try:
            model, inputs = FAMILIES[name]()
            values = tuple(inputs.values())
            flat = Flat(model.double().train(), list(inputs)).train()
            captured = capture_program(flat, values)
            plans = [random_plan(captured.graph, shape, seed) for shape in meshes for seed in range(2)]
            mode = "exact" if len(captured.graph.nodes) <= 300 else "recursive_programming"
            plans.append(search_graph(captured.graph, 4, search_mode=mode))
            rows = [compare(flat, values, captured, plan, meshes[plan.decisions.mesh]) for plan in plans]
            nodes = [node for node in captured.graph.nodes.values() if node.inputs]
            cut = sum(len(node.choices(2)) > 1 for node in nodes)
            shown = {
                "operators": len(nodes), "can be cut": cut, "unknown": sorted(set(captured.graph.unknown.values())),
                "error": max(row[0] for row in rows), "bytes": all(row[1] for row in rows),
            }  # fmt: skip
            if not shown["bytes"]:
                shown["differ"] = [(row[2], row[3]) for row in rows if not row[1]][:2]
        except Exception as error:  # a family that breaks is a row, not the end
            shown = {"failed": f"{type(error).__name__}: {str(error)[:300]}", "at": traceback.format_exc()[-600:]}
        if dist.get_rank() == 0:
            print(name, shown, f"{time.process_time() - started:.1f}s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
