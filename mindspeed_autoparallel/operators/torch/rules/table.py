"""The table of rules by aten operator."""

from __future__ import annotations

from collections.abc import Callable

from mindspeed_autoparallel.operators.torch.rules import base, layout, lookups, products
from mindspeed_autoparallel.operators.torch.rules.base import Call, Rule


def rule_of(operator: str, is_pointwise: bool) -> Callable[[Call], Rule] | None:
    """Return the rule of aten operator ``operator`` (without namespace and overload); None if it has none."""
    return _RULES.get(operator) or (base.pointwise if is_pointwise or operator in _POINTWISE else None)


NO_GRADIENT = frozenset(
    [
        *("stop_gradient", "detach", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
        *("randint_like", "uniform", "exponential", "normal_functional", "random", "geometric", "cauchy", "log_normal"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "bernoulli", "one_hot"),
    ]
)
"""Operators through which no gradient flows."""
BLOCKED_SLOTS = {
    **{name: frozenset({1}) for name in ("type_as", "expand_as", "reshape_as", "view_as")},
    "copy": frozenset({0}),
}
"""Inputs that get no gradient even if the output has one, by operator."""

_POINTWISE = frozenset(
    [
        *("clone", "contiguous", "_to_copy", "to", "dropout", "alias", "detach", "type_as", "masked_fill", "where"),
        *("lift_fresh_copy", "expand", "_unsafe_copy", "copy", "native_dropout", "silu", "gelu", "softplus", "relu"),
        *("mish", "hardswish", "expand_as", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like"),
        *("randn_like", "stop_gradient", "hardtanh", "leaky_relu", "elu", "hardsigmoid", "log_sigmoid", "relu6"),
        *("selu", "celu", "broadcast_to", "lift", "nan_to_num", "logit", "fmod", "remainder"),
    ]
)
_NAMES: dict[Callable[[Call], Rule], str] = {
    base.draw: "bernoulli",
    products.linear: "linear",
    products.matmul: "mm matmul bmm mv dot",
    products.baddbmm: "baddbmm",
    products.convolution: "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d",
    products.grouped_matmul: "_grouped_mm grouped_mm",
    products.recurrent: "lstm gru rnn_tanh rnn_relu",
    layout.reshape: "view _unsafe_view reshape unsqueeze squeeze flatten unflatten",
    layout.permute: "permute transpose t",
    base.normalised: "layer_norm rms_norm native_layer_norm",
    base.group_norm: "group_norm",
    base.channel_norm: "_native_batch_norm_legit_no_training",
    base.along: (
        "softmax _softmax log_softmax _log_softmax cumsum sort argsort cumprod logcumsumexp topk kthvalue cummax cummin"
    ),
    base.reduction: "sum mean amax amin max min argmax argmin any all std var var_mean linalg_vector_norm logsumexp",
    layout.part_of_dim: "slice select split split_with_sizes chunk unbind cat stack",
    layout.slice_scatter: "slice_scatter select_scatter",
    layout.turned: "roll flip",
    layout.repeated: "repeat",
    layout.leading: (
        "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
        "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool2d_with_indices "
        "max_pool3d_with_indices _adaptive_avg_pool2d upsample_nearest1d upsample_nearest2d upsample_nearest3d "
        "upsample_bilinear2d upsample_bicubic2d upsample_linear1d _upsample_bilinear2d_aa constant_pad_nd "
        "reflection_pad1d reflection_pad2d replication_pad2d pixel_shuffle pixel_unshuffle tril triu"
    ),
    lookups.embedding: "embedding",
    lookups.embedding_bag: "embedding_bag",
    lookups.indexed: "index index_select",
    lookups.index_put: "index_put",
    lookups.gathered: "gather",
    lookups.scattered: "scatter scatter_add scatter_reduce",
    products.attention: "scaled_dot_product_attention",
    base.constant: (
        "arange full ones zeros empty scalar_tensor _assert_tensor_metadata new_zeros new_ones new_full new_empty "
        "empty_strided eye linspace rand randn randperm randint"
    ),
}
_RULES = {name: rule for rule, names in _NAMES.items() for name in names.split()}
