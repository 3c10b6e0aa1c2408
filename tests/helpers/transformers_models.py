"""Small models of transformers with random weights: configurations drawn from all that the library has, shrunk by the
names of their fields. Nobody chose them by what works.

    for name, model, inputs in transformers_models(seed=0, count=40): ...
"""

import random
import sys
import warnings

import torch

SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner", "hidden_dim", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("decoder_ffn_dim", "inner_dim", "ffn_hidden_size", "ffw_hidden_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_query_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "vocab_size"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "rotary_dim", "v_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "n_group", "topk_group"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_decoder_layers", "num_encoder_layers"), 2),
    "image_size": 32, "patch_size": 8, "num_channels": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "use_cache": False, "first_k_dense_replace": 1, "cls_token_id": 1,
    "sep_token_id": 2, "sliding_window": 4, "n_group": 1, "topk_group": 1, "layer_types": None,
}  # fmt: skip
LARGEST = 2_000_000
"""Parameters of a model: what the names above do not make small is left out."""


def transformers_models(seed, count):
    """Yield (name, model, example keywords) of the first ``count`` models in an order drawn by ``seed`` that can be built
    and run by themselves."""
    from transformers.models.auto import modeling_auto as auto

    kinds = {
        **dict.fromkeys(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, ("AutoModelForCausalLM", _tokens)),
        **dict.fromkeys(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, ("AutoModelForMaskedLM", _tokens)),
        **dict.fromkeys(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, ("AutoModelForSeq2SeqLM", _both)),
        **dict.fromkeys(
            auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, ("AutoModelForImageClassification", _picture)
        ),
    }
    names = sorted(kinds)
    random.Random(seed).shuffle(names)
    found = 0
    for name in names:
        built = _built(name, *kinds[name])
        if built is not None:
            yield name, *built
            found += 1
        if found == count:
            return


class _InDouble:
    """Stands in for torch in a model's file: what it computes in fp32 inside an fp64 model is in fp64, too."""

    def __getattr__(self, name):
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


def language_model_in_double(name):
    """Return (name, model, inputs) of one causal language model, no part of which computes in fp32."""
    torch.Tensor.float = torch.Tensor.double
    model, inputs = _built(name, "AutoModelForCausalLM", _tokens)
    for module in {type(part).__module__ for part in model.modules()}:
        if module.startswith("transformers.models."):
            sys.modules[module].torch = _InDouble()
    return name, model, inputs


def _built(name, auto_class, inputs):
    """Return the model and its inputs; None where it cannot be made small, or does not run by itself."""
    import transformers

    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fields = set(vars(transformers.AutoConfig.for_model(name)))
            config = transformers.AutoConfig.for_model(
                name, **{key: value for key, value in SMALL.items() if key in fields and value is not None}
            )
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[: SMALL["num_hidden_layers"]]
            with torch.device("meta"):
                if sum(p.numel() for p in getattr(transformers, auto_class).from_config(config).parameters()) > LARGEST:
                    return None
            model = getattr(transformers, auto_class).from_config(config).double().train()
            if hasattr(model, "set_experts_implementation"):
                model.set_experts_implementation("batched_mm")
            given = inputs(config)
            made = model(**{key: value.clone() for key, value in given.items()})
            numbers = [v for v in made.values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
            sum(value.sum() for value in numbers).backward()
            model.zero_grad()
    except Exception:  # the library's own demands on a configuration, packages that are not installed
        return None
    return model, given


def _tokens(config):
    return {"input_ids": torch.randint(3, 60, (4, 8))}


def _both(config):
    return {**_tokens(config), "decoder_input_ids": torch.randint(3, 60, (4, 8))}


def _picture(config):
    size = getattr(config, "image_size", 32)
    high, wide = size if isinstance(size, list | tuple) else (size, size)
    return {"pixel_values": torch.randn(4, getattr(config, "num_channels", 3), high, wide, dtype=torch.float64)}
