"""Patches, applied on import, to the parts of Megatron that assume Transformer Engine, a compiler or a GPU."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mindspeed_autoparallel.patching import call_after_import
from mindspeed_autoparallel.runtime.devices.cpu.dataset_helpers import compile_dataset_helpers
from mindspeed_autoparallel.runtime.devices.cpu.edits import Edits


def install(edits: Edits) -> None:
    """Register the edits for the modules that need them."""
    for module, edit in (
        ("megatron.core.datasets.utils", _compilation_by_this_interpreter),
        ("megatron.core.transformer.torch_norm", _norm_under_sequence_parallel),
        ("megatron.core.tensor_parallel.random", _recompute_without_transformer_engine),
        ("megatron.core.transformer.moe.moe_utils", _dispatcher_splits),
        ("megatron.core.models.vision.clip_vit_model", _vision_norm),
        ("megatron.core.transformer.dot_product_attention", let_local_attention_take_two_head_sizes),
        ("megatron.core.transformer.dot_product_attention", let_local_attention_take_packed_sequences),
        ("megatron.core.transformer.multi_latent_attention", _no_transformer_engine),
        ("megatron.core.tensor_parallel.inference_layers", _no_inference_layers),
        ("megatron.core.fp8_utils", _empty_fp8_lists),
        ("megatron.core.optimizer.distrib_optimizer", _resumed_distributed_optimizer),
    ):
        call_after_import(module, functools.partial(_apply, edit, edits))


def _apply(edit: Callable[[Edits, ModuleType], None], edits: Edits, module: ModuleType) -> None:
    if not edits.undone:
        edit(edits, module)


def _compilation_by_this_interpreter(edits: Edits, module: ModuleType) -> None:
    # A wheel ships the compiled helpers but no Makefile, without which Megatron's own function ends rank 0.
    folder = Path(str(module.__file__)).parent
    edits.set(module, "compile_helpers", lambda: compile_dataset_helpers(folder) and None)


def _norm_under_sequence_parallel(edits: Edits, module: ModuleType) -> None:
    import torch

    kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": getattr(torch.nn, "RMSNorm", None)}

    def new(
        cls: Any,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> Any:
        if config.layernorm_zero_centered_gamma:
            raise ValueError("torch's norms have no zero-centered gamma; drop --apply-layernorm-1p on CPU")
        kind = kinds[config.normalization]
        assert kind is not None
        norm = kind(normalized_shape=hidden_size, eps=eps)
        # Torch's norm is correct under sequence parallelism if its gradients are summed over the group.
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    edits.set(module.WrappedTorchNorm, "__new__", staticmethod(new))


def _recompute_without_transformer_engine(edits: Edits, module: ModuleType) -> None:
    if not getattr(module, "HAVE_TE", False) and not hasattr(module, "FP8GlobalStateManager"):

        class NoFp8:
            """CheckpointWithoutOutput calls these two even without fp8."""

            @staticmethod
            def is_fp8_enabled() -> bool:
                return False

            @staticmethod
            def get_fp8_recipe() -> None:
                return None

        edits.set(module, "FP8GlobalStateManager", NoFp8)
        edits.set(module, "activation_recompute_forward", lambda *args, **kwargs: contextlib.nullcontext())
        edits.set(module, "fp8_autocast", lambda *args, **kwargs: contextlib.nullcontext())
    # The device's generator is the CPU's here: the warning "CPU RNG state changed" would be constant and meaningless.
    logger = logging.getLogger(module.__name__)
    logger.addFilter(_is_no_rng_warning)
    edits.on_undo(lambda: logger.removeFilter(_is_no_rng_warning))
    if hasattr(module, "_get_share_storage"):

        def share(target: Any, source: Any) -> None:
            # Replaces a C++ extension that every rank would compile for half a minute.
            storage = target.untyped_storage()
            storage.resize_(source.untyped_storage().nbytes())
            if storage.device.type != "meta":  # meta has no data to copy, and torch would never free either
                storage.copy_(source.untyped_storage())

        edits.set(module, "_get_share_storage", lambda: share)


def _is_no_rng_warning(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


def _dispatcher_splits(edits: Edits, module: ModuleType) -> None:
    import torch

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # The original converts only if is_cuda, and all_to_all_single refuses tensors as split sizes.
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    if not hasattr(module, "te_general_gemm"):
        # 0.16: the router compares this name with None, but the failed import has not defined it.
        edits.set(module, "te_general_gemm", None)
    if hasattr(module, "maybe_move_tensor_to_cpu"):
        edits.set(module, "maybe_move_tensor_to_cpu", to_cpu)


def _no_transformer_engine(edits: Edits, module: ModuleType) -> None:
    # 0.16 and newer set HAVE_TE if their own wrapper can be imported, which also works without Transformer Engine.
    if getattr(module, "HAVE_TE", False) and not isinstance(getattr(module, "TELinear", object), type):
        edits.set(module, "HAVE_TE", False)


def _no_inference_layers(edits: Edits, module: ModuleType) -> None:
    # 0.20: multi-token prediction tests its layers against the inference layers, whose names are no classes without
    # Transformer Engine.
    name = "is_inference_column_parallel_linear"
    if hasattr(module, name) and not getattr(module, "HAVE_TE", False):
        edits.set(module, name, lambda layer: False)


def _vision_norm(edits: Edits, module: ModuleType) -> None:
    import torch
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    # The default norm is torch's LayerNorm, which rejects the argument ``config``.
    construct = module.CLIPViTModel.__init__
    defaults = tuple(WrappedTorchNorm if item is torch.nn.LayerNorm else item for item in construct.__defaults__ or ())
    edits.set(construct, "__defaults__", defaults)
    if getattr(module, "NORM_IMPL", None) is torch.nn.LayerNorm:
        edits.set(module, "NORM_IMPL", WrappedTorchNorm)


def _empty_fp8_lists(edits: Edits, module: ModuleType) -> None:
    if getattr(module, "HAVE_TE", False):
        return
    # 0.12: without Transformer Engine these raise even for an empty list of fp8 parameters.
    original = getattr(module, "_quantize_param_shard_impl", None)
    if original is not None:

        def quantize(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            return original(parameters, *args, **kwargs) if len(parameters) else None

        edits.set(module, "_quantize_param_shard_impl", quantize)
    if hasattr(module, "_correct_amax_history_if_needed_impl"):
        edits.set(module, "_correct_amax_history_if_needed_impl", lambda model: None)


def _resumed_distributed_optimizer(edits: Edits, module: ModuleType) -> None:
    """Restore a step count for each parameter: Megatron assumes a fused optimizer, which counts steps per group;
    torch's Adam counts them per parameter."""
    import torch

    optimizer_class = module.DistributedOptimizer
    read, load, fill = (
        getattr(optimizer_class, name, None)
        for name in ("state_dict", "load_state_dict", "_set_main_param_and_optimizer_states")
    )
    if read is None or load is None or fill is None:
        return

    @functools.wraps(read)
    def state_dict(self: Any) -> Any:
        # Megatron may read the state before the first step, while it is empty: start from Adam's initial values.
        if isinstance(self.optimizer, torch.optim.Adam) and not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    self.optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        return read(self)

    @functools.wraps(load)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(self, *args, **kwargs)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                # A tensor shared by all parameters would be incremented once per parameter.
                state["step"] = state["step"].clone()
        return result

    @functools.wraps(fill)
    def set_states(self: Any, model_param: Any, tensors: dict[str, object], *args: Any, **kwargs: Any) -> Any:
        # The count was restored with the groups, so it is copied onto itself: Megatron's default format stores a count
        # per parameter, sliced like its values, and rank folders store none. In fp32 the main weights are views of
        # the model's, and autograd forbids writing to those.
        group, number = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][number]]
        with torch.no_grad():
            return fill(self, model_param, {**tensors, "step": state.get("step")}, *args, **kwargs)

    edits.set(optimizer_class, "state_dict", state_dict)
    edits.set(optimizer_class, "load_state_dict", load_state_dict)
    edits.set(optimizer_class, "_set_main_param_and_optimizer_states", set_states)


def let_local_attention_take_two_head_sizes(edits: Edits, module: ModuleType) -> None:
    """Let ``DotProductAttention`` take ``k_channels`` and ``v_channels``, elements per head, as Transformer Engine's
    does.

    Megatron's forward takes all sizes from its tensors except for the width of the output, which the constructor
    computes from ``config.kv_channels``.
    """
    attention: Any = module.DotProductAttention
    construct, forward = attention.__init__, attention.forward
    if "v_channels" in inspect.signature(construct).parameters:
        return

    @functools.wraps(construct)
    def initialize(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        construct(self, *args, **kwargs)
        self.has_latent_heads = v_channels is not None
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    @functools.wraps(forward)
    def contiguous_forward(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "has_latent_heads", False):
            # Key and value are slices of one projection, and the forward views them in other shapes.
            key, value = key.contiguous(), value.contiguous()
        return forward(self, query, key, value, *args, **kwargs)

    edits.set(attention, "__init__", initialize)
    edits.set(attention, "forward", contiguous_forward)


def let_local_attention_take_packed_sequences(edits: Edits, module: ModuleType) -> None:
    """Let ``DotProductAttention`` take ``PackedSeqParams`` (``thd``), as Transformer Engine's does: ``query [t, n, d]``
    -> ``[t, 1, n * d]``, one sequence after another, each by Megatron's own forward."""
    import torch
    from megatron.core.transformer.enums import AttnMaskType

    attention: Any = module.DotProductAttention
    forward = attention.forward
    causal_kinds = {AttnMaskType.causal, getattr(AttnMaskType, "padding_causal", AttnMaskType.causal)}

    @functools.wraps(forward)
    def packed_forward(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        packed: Any = kwargs.get("packed_seq_params")
        if getattr(packed, "qkv_format", None) != "thd":
            return forward(self, query, key, value, *args, **kwargs)
        padded = getattr(packed, "cu_seqlens_q_padded", None)
        boundaries = (packed.cu_seqlens_q if padded is None else padded).tolist()
        kind = kwargs.get("attn_mask_type") or self.attn_mask_type
        parts = []
        for start, stop in itertools.pairwise([*boundaries, query.shape[0]]):
            # The last boundary may repeat; rows after it are padding.
            if stop > start:
                rows = (tensor[start:stop].unsqueeze(1).contiguous() for tensor in (query, key, value))
                length = stop - start
                mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).triu(1)
                parts.append(forward(self, *rows, mask if kind in causal_kinds else None))
        return torch.cat(parts)

    edits.set(attention, "forward", packed_forward)
