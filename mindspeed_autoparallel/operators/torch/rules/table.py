"""The table of rules by aten operator."""

from __future__ import annotations

from collections.abc import Callable

from mindspeed_autoparallel.operators.torch.rules.base import (
    Call,
    Rule,
    along,
    channel_norm,
    constant,
    draw,
    group_norm,
    normalised,
    pointwise,
    reduction,
)
from mindspeed_autoparallel.operators.torch.rules.layout import (
    leading,
    part_of_dim,
    permute,
    repeated,
    reshape,
    slice_scatter,
    turned,
)
from mindspeed_autoparallel.operators.torch.rules.lookups import (
    embedding,
    embedding_bag,
    gathered,
    index_put,
    indexed,
    scattered,
)
from mindspeed_autoparallel.operators.torch.rules.products import (
    attention,
    baddbmm,
    convolution,
    grouped_matmul,
    linear,
    matmul,
    recurrent,
)


def rule_of(operator: str, is_pointwise: bool) -> Callable[[Call], Rule] | None:
    """Return the rule of aten operator ``operator`` (without namespace and overload); None if it has none."""
    return _RULES.get(operator) or (pointwise if is_pointwise or operator in _POINTWISE else None)


NO_GRADIENT = frozenset(
    [
        "stop_gradient",
        "detach",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "rand_like",
        "randn_like",
        "randint_like",
        *("uniform", "exponential", "normal_functional", "random", "geometric", "cauchy", "log_normal"),
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "bernoulli",
        "one_hot",
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
_RULES: dict[str, Callable[[Call], Rule]] = {
    "bernoulli": draw,
    "linear": linear,
    **dict.fromkeys(("mm", "matmul", "bmm", "mv", "dot"), matmul),
    "baddbmm": baddbmm,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), convolution),
    **dict.fromkeys(("_grouped_mm", "grouped_mm"), grouped_matmul),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), recurrent),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten"), reshape),
    **dict.fromkeys(("permute", "transpose", "t", "movedim"), permute),
    **dict.fromkeys(("layer_norm", "rms_norm", "native_layer_norm"), normalised),
    "group_norm": group_norm,
    "_native_batch_norm_legit_no_training": channel_norm,
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "sort", "argsort"), along),
    **dict.fromkeys(("cumprod", "logcumsumexp", "topk", "kthvalue", "cummax", "cummin"), along),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all"), reduction),
    **dict.fromkeys(("std", "var", "var_mean", "linalg_vector_norm", "logsumexp"), reduction),
    **dict.fromkeys(("slice", "select", "split", "split_with_sizes", "chunk", "unbind", "cat", "stack"), part_of_dim),
    **dict.fromkeys(("slice_scatter", "select_scatter"), slice_scatter),
    **dict.fromkeys(("roll", "flip"), turned),
    "repeat": repeated,
    **{
        f"{kind}_pool{places}": leading
        for kind in ("max", "avg", "adaptive_avg", "adaptive_max")
        for places in ("1d", "2d", "3d")
    },
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices", "_adaptive_avg_pool2d"), leading),
    **dict.fromkeys(("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d"), leading),
    **dict.fromkeys(("upsample_bicubic2d", "upsample_linear1d", "_upsample_bilinear2d_aa"), leading),
    **dict.fromkeys(("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad2d"), leading),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle", "tril", "triu"), leading),
    "embedding": embedding,
    "embedding_bag": embedding_bag,
    **dict.fromkeys(("index", "index_select"), indexed),
    "index_put": index_put,
    "gather": gathered,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), scattered),
    "scaled_dot_product_attention": attention,
    **dict.fromkeys(("arange", "full", "ones", "zeros", "empty", "scalar_tensor", "_assert_tensor_metadata"), constant),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty", "empty_strided", "eye", "linspace"), constant),
    **dict.fromkeys(("rand", "randn", "randperm", "randint"), constant),
}
