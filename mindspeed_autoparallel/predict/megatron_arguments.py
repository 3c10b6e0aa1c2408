"""Turns Megatron's arguments, as a log prints them or a launch gives them, into a prediction request.

Names are those of Megatron's namespace (``tensor_model_parallel_size``); MindSpeed's own are among them. What is not
there has Megatron's default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mindspeed_autoparallel.cost.analytic.fields import integer
from mindspeed_autoparallel.cost.analytic.placement import unfold_layout
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.arguments import Arguments, refuse_unmodelled

_TENSOR_OVERLAPS = ("tp_comm_overlap", "use_mc2", "use_ascend_mc2", "use_ascend_coc")
_EXCHANGE_OVERLAPS = (
    *("overlap_moe_expert_parallel_comm", "moe_fb_overlap"),
    *("moe_alltoall_overlap_comm", "moe_allgather_overlap_comm"),
)


def request_of_arguments(values: Mapping[str, object], hardware: Mapping[str, object]) -> dict[str, object]:
    """Return the request that a run with arguments ``values`` on ``hardware`` (a request's ``hw``) makes.

    Raises ``ConfigError`` naming the argument for what is not modelled or missing.
    """
    arguments = Arguments(values)
    refuse_unmodelled(arguments)
    devices = hardware.get("num_gpus")
    if (
        arguments.has("use_tp_pp_dp_mapping")
        and isinstance(devices, int)
        and devices > integer(hardware, "gpus_per_node", 8, "hw")
    ):
        raise ConfigError("--use-tp-pp-dp-mapping: another order of ranks over several nodes is not modelled.")
    sections = {"model": _model(arguments), "parallel": _parallel(arguments), "train": _train(arguments)}
    kept = {name: {key: value for key, value in part.items() if value is not None} for name, part in sections.items()}
    return {**kept, "hw": dict(hardware)}


def switches_of_arguments(values: Mapping[str, object]) -> dict[str, object]:
    """Return the request's ``train`` that the arguments describe, without what a search chooses: batch and recompute.

    Raises ``ConfigError`` naming the argument for what is not modelled.
    """
    arguments = Arguments(values)
    refuse_unmodelled(arguments)
    return {
        key: value
        for key, value in _train(arguments).items()
        if value is not None and key not in ("gbs", "mbs") and not key.startswith("recompute")
    }


def model_of_arguments(values: Mapping[str, object]) -> dict[str, object]:
    """Return the request's ``model`` that the arguments describe; query groups count without their switch, too."""
    return model_and_rest(values)[0]


def model_and_rest(values: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Return the request's ``model`` that the arguments describe, and the arguments that it was not read from."""
    grouped = {"group_query_attention": True} if values.get("num_query_groups") else {}
    arguments = Arguments({**grouped, **values})
    model = _model(arguments)
    return {key: value for key, value in model.items() if value is not None}, arguments.unread()


def _model(arguments: Arguments) -> dict[str, object]:
    experts = arguments.integer("num_experts", "num_moe_experts")
    shared = arguments.integer("moe_shared_expert_intermediate_size")
    moe_ffn = arguments.integer("moe_ffn_hidden_size", "moe_intermediate_size")
    if shared is None and arguments.integer("n_shared_experts") and moe_ffn:
        shared = arguments.integer("n_shared_experts", "num_shared_experts")
        shared = shared * moe_ffn if shared else None
    pattern = arguments.text("hybrid_layer_pattern", "hybrid_override_pattern")
    layers = arguments.integer("num_layers", "encoder_num_layers")
    model: dict[str, object] = {
        "type": "hybrid" if pattern else "moe" if experts else "gpt",
        "num_layers": None if pattern else layers,
        "layer_pattern": pattern,
        "hidden": arguments.integer("hidden_size"),
        "heads": arguments.integer("num_attention_heads"),
        "kv_heads": arguments.integer("num_query_groups") if arguments.has("group_query_attention") else None,
        "head_size": arguments.integer("kv_channels"),
        "ffn": arguments.integer("ffn_hidden_size"),
        "seq": arguments.integer("seq_length", "encoder_seq_length"),
        "vocab": arguments.integer("padded_vocab_size", "vocab_size"),
        "swiglu": any(arguments.has(name) for name in ("swiglu", "geglu", "gelu_tanh")),
        "activation": "gelu_tanh" if arguments.has("gelu_tanh") else "gelu" if arguments.has("geglu") else None,
        "logit_softcap": arguments.has("output_logit_softcapping") or None,
        "tied_embeddings": not arguments.has("untie_embeddings_and_output_weights"),
        "num_experts": experts,
        "topk": arguments.integer("moe_router_topk") if experts else None,
        "moe_ffn": moe_ffn if experts else None,
        "shared_expert_ffn": shared if experts else None,
        # -1 is no layer to MindSpeed-LLM.
        "num_dense_layers": max(0, arguments.integer("first_k_dense_replace") or 0) or None if experts else None,
        "moe_layer_freq": arguments.text("moe_layer_freq") if experts else None,
        "dispatcher": arguments.text("moe_token_dispatcher_type") if experts else None,
        "mtp_layers": arguments.integer("mtp_num_layers"),
        "qk_norm": arguments.has("qk_layernorm") or None,
        "post_norm": arguments.has("post_norm") or None,
        "mla": _latent(arguments),
        "window": arguments.integer("sliding_window_size", "sliding_window") or _window(arguments),
    }
    if arguments.has("mamba_num_heads") or (pattern and "M" in pattern):
        sizes = {
            "num_heads": arguments.integer("mamba_num_heads"),
            "head_dim": arguments.integer("mamba_head_dim"),
            "state_dim": arguments.integer("mamba_state_dim"),
            "num_groups": arguments.integer("mamba_num_groups"),
        }
        model["mamba"] = {key: value for key, value in sizes.items() if value is not None}
    if arguments.has("moe_expert_capacity_factor") and experts:
        model["capacity_factor"] = arguments.number("moe_expert_capacity_factor")
    if arguments.has("enable_dsa_indexer"):
        model["dsa"] = {
            "topk": arguments.integer("index_topk"),
            "heads": arguments.integer("index_n_heads"),
            "fused": arguments.has("use_sparse_flash_attn"),
        }
    return model


def _window(arguments: Arguments) -> int | None:
    """Return Megatron's ``--window-size``: how many tokens before and after, as ``(127, 0)``."""
    found = re.findall(r"-?\d+", arguments.text("window_size") or "")
    return int(found[0]) + 1 if found and int(found[0]) > 0 else None


def _latent(arguments: Arguments) -> dict[str, int] | None:
    if not (arguments.has("multi_latent_attention") or arguments.has("multi_head_latent_attention")):
        return None
    # Megatron's own defaults.
    return {
        "q_lora_rank": arguments.integer("q_lora_rank") or 0,
        "kv_lora_rank": arguments.integer("kv_lora_rank") or 32,
        "qk_nope_head_dim": arguments.integer("qk_nope_head_dim", "qk_head_dim") or 128,
        "qk_rope_head_dim": arguments.integer("qk_rope_head_dim", "qk_pos_emb_head_dim") or 64,
        "v_head_dim": arguments.integer("v_head_dim") or 128,
    }


def _parallel(arguments: Arguments) -> dict[str, object]:
    pipeline = arguments.integer("pipeline_model_parallel_size") or 1
    layout: dict[str, object] = {
        "tp": arguments.integer("tensor_model_parallel_size"),
        "pp": pipeline,
        "cp": arguments.integer("context_parallel_size"),
        "ep": arguments.integer("expert_model_parallel_size"),
        "etp": arguments.integer("expert_tensor_parallel_size"),
        "sp": arguments.has("sequence_parallel"),
        "dist_opt": arguments.has("use_distributed_optimizer"),
        "cp_type": (arguments.text("context_parallel_algo", "cp_comm_type") or "").strip("[]'\"") or None,
        "ulysses_degree": arguments.integer("ulysses_degree_in_cp"),
        "pipeline_layout": arguments.text("pipeline_model_parallel_layout"),
        "num_layer_list": arguments.text("num_layer_list"),
        "noop_layers": arguments.text("noop_layers"),
        "first_stage_layers": arguments.integer("decoder_first_pipeline_num_layers"),
        "last_stage_layers": arguments.integer("decoder_last_pipeline_num_layers"),
        "account_for_embedding": arguments.has("account_for_embedding_in_pipeline_split") or None,
        "account_for_loss": arguments.has("account_for_loss_in_pipeline_split") or None,
        "microbatch_group_size": arguments.integer("microbatch_group_size_per_virtual_pipeline_stage"),
        "schedule": arguments.text("schedules_method"),
    }
    if arguments.integer("context_parallel_size") in (None, 1):
        layout.update(cp_type=None, ulysses_degree=None)
    if pipeline > 1:
        layout["vpp"] = arguments.integer(
            "num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size"
        )
        layout["layers_per_chunk"] = arguments.integer("num_layers_per_virtual_pipeline_stage")
        if layout["pipeline_layout"] and not layout["vpp"]:
            layout["vpp"] = (unfold_layout(str(layout["pipeline_layout"])).count("|") + 1) // pipeline
    if arguments.has("tp_2d"):
        layout["tp_2d"] = {"x": arguments.integer("tp_x"), "y": arguments.integer("tp_y")}
    return layout


def _train(arguments: Arguments) -> dict[str, object]:
    granularity = arguments.text("recompute_granularity")
    if granularity is None and arguments.has("recompute_activations"):
        granularity = "selective"
    fusion = arguments.has("cross_entropy_loss_fusion")
    # A launch has the word, a namespace an enumeration's member.
    backend = (arguments.text("attention_backend") or "").rpartition(".")[2]
    unfused = backend == "unfused" or (
        arguments.text("transformer_impl") == "local" and not arguments.has("use_flash_attn")
    )
    train: dict[str, object] = {
        "gbs": arguments.integer("global_batch_size"),
        "mbs": arguments.integer("micro_batch_size"),
        "stack": "megatron-core",
        "recompute": granularity or "none",
        "recompute_method": arguments.text("recompute_method"),
        "recompute_num_layers": arguments.integer("recompute_num_layers"),
        "recompute_modules": arguments.text("recompute_modules"),
        "recompute_per_pp_rank": arguments.has("enable_recompute_layers_per_pp_rank") or None,
        "recompute_extra": _extra(arguments),
        "precision": _precision(arguments),
        "fp8_dot_product_attention": arguments.has("fp8_dot_product_attention") or None,
        "attention": "unfused" if unfused else "fused",
        # Megatron's own fused loss keeps fp32 logits, Transformer Engine's does not.
        "cross_entropy_fusion": fusion and arguments.text("cross_entropy_fusion_impl") == "te",
        "overlap_grad_reduce": arguments.has("overlap_grad_reduce"),
        "tp_comm_overlap": any(arguments.has(name) for name in _TENSOR_OVERLAPS),
        "moe_a2a_overlap": any(arguments.has(name) for name in _EXCHANGE_OVERLAPS),
        "own_masks": own_masks(
            arguments.has("interleave_sliding_window"), arguments.text("tokenizer_padding_side") == "left"
        ),
        "rope_fusion": False if arguments.denied("use_fused_rotary_pos_emb") and arguments.text(
            "position_embedding_type") == "rope" else None,
        "reuse_fp32_param": arguments.has("reuse_fp32_param") or None,
        "grouped_gemm": arguments.has("moe_grouped_gemm") if arguments.has("num_experts") else None,
        "gradient_accumulation_fusion": _gradient_fusion(arguments),
        "optimizer": arguments.text("optimizer"),
        "loss_slices": arguments.integer("output_layer_slice_num"),
        **_states(arguments),
    }  # fmt: skip
    rate = arguments.number("attention_dropout", "hidden_dropout")
    train["dropout"] = rate is None or rate > 0
    swapped = [name for name in ("swap-optimizer", "swap-attention") if arguments.has(name.replace("-", "_"))]
    train["offload"] = swapped or None
    if arguments.integer("lora_r", "lora_rank"):
        targets = (arguments.text("lora_target_modules") or "").strip("[]").replace("'", "").replace(",", " ")
        train["lora"] = {"r": arguments.integer("lora_r", "lora_rank"), "targets": targets.split()}
    if arguments.text("stage") in ("dpo", "simpo", "sft"):
        train["task"] = arguments.text("stage")
    graph = arguments.text("cuda_graph_impl")
    if graph or arguments.has("enable_cuda_graph") or arguments.has("external_cuda_graph"):
        train["cuda_graph"] = "transformer_engine" if graph != "local" else "local"
    return train


def _states(arguments: Arguments) -> dict[str, object]:
    """Return the types in which gradients, parameters and the optimizer's state are kept, and what of them on the host.

    Megatron's own defaults, which a request's are not: fp32 gradients and parameters in two bytes beside a recipe.
    """
    quantized = _precision(arguments) not in ("bf16", "fp16", "fp32")
    states: dict[str, object] = {
        "grad_reduce_in_bf16": arguments.has("grad_reduce_in_bf16") if quantized or arguments.has("bf16") else None,
        "fp8_param_gather": (arguments.has("fp8_param_gather") or arguments.has("fp4_param_gather"))
        if quantized
        else None,
        "optimizer_cpu_offload": arguments.has("optimizer_cpu_offload") or None,
    }
    if states["optimizer_cpu_offload"]:
        states["optimizer_offload_fraction"] = arguments.number("optimizer_offload_fraction")
    if arguments.has("use_precision_aware_optimizer"):
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            states[name] = arguments.text(name)
    return states


def own_masks(windowed: bool, padded_left: bool) -> float | None:
    """Return the share of layers that keep a mask of their own: every second one where MindSpeed-LLM reads masks with
    the data, which it does where texts are padded on the left."""
    return 0.5 if windowed and padded_left else None


def _gradient_fusion(arguments: Arguments) -> bool:
    if arguments.has("no_gradient_accumulation_fusion"):
        return False
    if arguments.has("gemm_gradient_accumulation_fusion"):
        return True
    # A namespace has the value itself, a launch only the switch that turns it off.
    return arguments.has("gradient_accumulation_fusion") if arguments.text("gradient_accumulation_fusion") else True


def _extra(arguments: Arguments) -> list[str] | None:
    extra = []
    for name in ("recompute-activation-function", "recompute-norm"):
        if arguments.has(name.replace("-", "_")):
            extra.append(name)
            layers = arguments.integer(f"{name.replace('-', '_')}_num_layers")
            if layers is not None:
                extra.append(f"{name}-num-layers={layers}")
    return extra or None


def _precision(arguments: Arguments) -> str:
    recipe, form = arguments.text("fp8_recipe"), arguments.text("fp8_format", "fp8")
    if form:
        return {"mxfp8": "mxfp8", "blockwise": "fp8_blockwise"}.get(recipe or "", "fp8")
    if arguments.text("fp4_format", "fp4"):
        return "nvfp4"
    return "bf16" if arguments.has("bf16") else "fp16" if arguments.has("fp16") else "fp32"
