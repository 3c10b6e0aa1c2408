"""Token mixers of a layer: attention with its projections, latent attention, Mamba, linear attention."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.cost.analytic.kernels import NOTHING, Times, attention_operations, linear_us, memory_pass_us
from mindspeed_autoparallel.cost.analytic.model_shape import LayerKind
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.collectives import Fabric
from mindspeed_autoparallel.cost.device import Device, Efficiency

_CONVOLUTION_PASSES = 6
"""Passes over what linear attention's convolution and gates read and write, forward."""
_SCAN_CHUNK = 128
"""Tokens of a chunk of Mamba-2's scan: the default of Megatron's ``MambaMixer``."""
_SCAN_BYTES, _SCAN_BACKWARD_BYTES = (16, 12, 8, 8), (42, 34, 28, 24)
"""Bytes that the kernels of ``mamba_split_conv1d_scan_combined`` and the gated norm move for a token, forward and
backward (which runs convolution and chunk states again). They are per element of the inner width, of the chunk's states
(most in fp32), of the state's inputs and outputs, and of the products of the two in a chunk (fp32). Counted in
state-spaces/mamba at e9594ce, ``ssd_combined.py``."""
_QUANTIZED_ATTENTION = 1.34
"""How much faster attention in mxfp8 is than in bf16, forward and backward, with heads of 192 and 128: 1.31 on GB200,
1.38 on GB300, over 4,096 tokens. With grouped heads of 128 it is 0.98 to 1.02 times as fast, which is not counted. Both
in NVIDIA/cudnn-frontend@3929da2, ``benchmark/sdpa_benchmark_training``."""
_RING_LAUNCHES = 1.0
"""Host time of one ring step, in layers: a pair of messages, attention on its part, and merging the two results.
About one by short sequences on four Ascend ranks."""
_ROTARY_PASSES = 10
"""Passes over queries and keys that rotating them takes beyond a fused kernel's two: two products, halves exchanged and
joined, their sum, and a copy; as many backward."""
_ROTARY_LAUNCHES = 0.4
"""Host time of these ten kernels, in layers, which launch some twenty-five."""
_GATE_PASSES = 5
"""Passes over attention's output to gate it: a sigmoid reads and writes, the product reads both and writes."""
_RING_UPDATE_BYTES = 14
"""Bytes per element of the output that a ring step moves to merge its part: two in the training precision, and the
running output in fp32, read and written."""


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """One mixer of one layer, in microseconds of one microbatch."""

    projections: Times = NOTHING
    core: Times = NOTHING
    up_us: float = 0.0
    """Latent attention's up-projections forward, which selective recompute may repeat."""
    exposed: tuple[float, float] = (0.0, 0.0)
    """Exposed time of context parallelism's messages, forward and backward."""
    launches: float = 0.0
    """Host time forward, in layers of plain attention and a dense MLP."""


def mixing(work: Workload, device: Device, efficiency: Efficiency, fabric: Fabric, kind: LayerKind) -> Mixing:
    if kind.mixer == "attention":
        return _attention(work, device, efficiency, fabric)
    if kind.mixer == "mamba":
        return _mamba(work, device, efficiency)
    if kind.mixer == "linear":
        return _linear_attention(work, device, efficiency)
    return Mixing()


def _attention(work: Workload, device: Device, efficiency: Efficiency, fabric: Fabric) -> Mixing:
    model, tokens, tensor = work.model, work.tokens, work.tensor_size
    launches, up_us = 0.5, 0.0
    if model.latent:
        projections, up_us = _latent_projections(work, device, efficiency)
        width = model.heads * (model.latent.query_size + model.latent.value_size) / 2 / tensor
        launches += 0.4
        if model.attention_gate:
            values = model.heads * model.latent.value_size / tensor
            gate = linear_us(device, efficiency, tokens, model.hidden, values, recipe=work.recipe)
            passes = memory_pass_us(device, efficiency, _GATE_PASSES * tokens * values * work.element_bytes)
            projections = projections.plus(gate).plus(Times(passes, 2 * passes))
    else:
        width = model.query_size / tensor
        outputs = ((1 + model.attention_gate) * model.query_size + 2 * model.kv_size) / tensor
        projections = linear_us(device, efficiency, tokens, model.hidden, outputs, recipe=work.recipe)
        projections = projections.plus(
            linear_us(device, efficiency, tokens, model.query_size / tensor, model.hidden, recipe=work.recipe)
        )
        if not work.fused_rotary:
            rotated = tokens * (model.query_size + model.kv_size) / tensor * work.element_bytes
            passes = memory_pass_us(device, efficiency, _ROTARY_PASSES * rotated)
            projections, launches = projections.plus(Times(passes, passes)), launches + _ROTARY_LAUNCHES
    core = _core(work, device, efficiency, width)
    if model.sparse:
        core, launches = core.plus(_indexer(work, device, efficiency)), launches + 0.6
    exposed, more = _context(work, device, efficiency, fabric, core, width)
    return Mixing(projections=projections, core=core, up_us=up_us, exposed=exposed, launches=launches + more)


def _latent_projections(work: Workload, device: Device, efficiency: Efficiency) -> tuple[Times, float]:
    """Return the down- and up-projections of queries and keys, and the output; and the up-projections' forward."""
    model, tokens = work.model, work.tokens
    latent = model.latent
    assert latent is not None

    def linear(inputs: float, outputs: float) -> Times:
        return linear_us(device, efficiency, tokens, inputs, outputs, recipe=work.recipe)

    heads = model.heads / work.tensor_size
    queries = heads * latent.query_size
    up = linear(latent.query_rank or model.hidden, queries)
    up = up.plus(linear(latent.key_value_rank, heads * (latent.nope_size + latent.value_size)))
    down = linear(model.hidden, latent.key_value_rank + latent.rope_size)
    if latent.query_rank:
        down = down.plus(linear(model.hidden, latent.query_rank))
    out = linear(heads * latent.value_size, model.hidden)
    # Concatenating, splitting and rotating queries and keys: read and written twice.
    moved = memory_pass_us(device, efficiency, 4 * 2 * queries * tokens * work.element_bytes)
    return up.plus(down).plus(out).plus(Times(moved, moved)), up.forward_us


def _core(work: Workload, device: Device, efficiency: Efficiency, width: float) -> Times:
    model, reach = work.model, work.model.attention_reach
    speed = device.peak_tflops * 1e6 * efficiency.attention_fraction
    if model.sparse and not model.sparse.fused:
        # All scores are computed and masked: read and written in fp32 a few times.
        scores = work.tokens * reach * model.heads / work.tensor_size
        masked = memory_pass_us(device, efficiency, 4 * scores * efficiency.softmax_passes)
        operations = attention_operations(reach, work.tokens, width, causal_fused=False)
        return Times(operations / speed + masked, 2 * (operations / speed + masked))
    if model.sparse:
        reach = min(reach, 2.0 * model.sparse.topk)  # of a causal sequence half is skipped below
    operations = attention_operations(reach, work.tokens, width, work.fused_attention and model.causal)
    if work.fused_attention:
        windowed = attention_operations(min(model.window, reach), work.tokens, width, causal_fused=False)
        operations += model.windowed_share * (min(operations, windowed) - operations)
        if work.quantized_attention and model.latent:
            speed *= _QUANTIZED_ATTENTION
        return Times(operations / speed, 2.5 * operations / speed)
    heads = work.sequences * model.heads / work.tensor_size
    matrix = heads * model.sequence * model.sequence / work.context_size * work.element_bytes
    softmax = memory_pass_us(device, efficiency, matrix * efficiency.softmax_passes)
    if heads % 4:
        softmax *= 3  # the fused softmax kernel requires a multiple of four matrices
    return Times(operations / speed + softmax, 2 * operations / speed + softmax)


def _indexer(work: Workload, device: Device, efficiency: Efficiency) -> Times:
    """Return the scores of all earlier tokens for every token, and the projections they need (no gradient of the
    scores)."""
    model, sparse = work.model, work.model.sparse
    assert sparse is not None
    width = sparse.heads * sparse.head_size
    source = model.latent.query_rank if model.latent and model.latent.query_rank else model.hidden
    into = linear_us(device, efficiency, work.tokens, source, width)
    scores = 0.5 * attention_operations(model.attention_reach, work.tokens, width, model.causal)
    scored = scores / (device.peak_tflops * 1e6 * efficiency.attention_fraction)
    # Selecting the best tokens reads and writes a matrix of fp32 scores.
    chosen = memory_pass_us(device, efficiency, 8 * work.tokens * model.attention_reach)
    return into.plus(Times(scored + chosen, 0.0))


def _context(
    work: Workload, device: Device, efficiency: Efficiency, fabric: Fabric, core: Times, width: float
) -> tuple[tuple[float, float], float]:
    """Return the time that context parallelism adds forward and backward, and the host's share of it."""
    if work.context_size == 1:
        return (0.0, 0.0), 0.0
    model, size = work.model, work.element_bytes
    heads = work.tokens * size
    if model.latent:
        keys = 2 * width * heads
    else:
        keys = 2 * heads * model.kv_size / work.tensor_size
    exchanged = (2 * width * heads) + keys
    ring = work.context_size // work.ulysses_size
    exposed = [0.0, 0.0]
    if work.ulysses_size > 1:
        moving = fabric.exchange_us(exchanged, work.ulysses_size, work.tensor_size)
        # Before and after it, heads and tokens are transposed in memory.
        turning = memory_pass_us(device, efficiency, 2 * exchanged)
        exposed = [moving + turning, moving + turning]
    if work.context_kind == "allgather":
        gathering = fabric.one_shot_us(keys * work.context_size, work.context_size, work.tensor_size)
        return (gathering, 2 * gathering), 0.2
    launches = 0.2 if work.ulysses_size > 1 else 0.0
    if ring > 1:
        span = work.tensor_size * work.context_size
        stride = work.tensor_size if span <= fabric.devices_per_node else span
        sends = (ring - 1) * fabric.send_us(keys * work.ulysses_size, stride)
        update = memory_pass_us(device, efficiency, (ring - 1) * work.tokens * width * _RING_UPDATE_BYTES)
        covered = (ring - 1) / ring
        exposed[0] += max(0.1 * sends, sends - covered * core.forward_us) + update
        exposed[1] += max(0.1 * sends, 2 * sends - covered * core.input_gradient_us) + 2 * update
        launches += _RING_LAUNCHES * (ring - 1)
    return (exposed[0], exposed[1]), launches


def _mamba(work: Workload, device: Device, efficiency: Efficiency) -> Mixing:
    """Return the work of mamba-2: projections, a short convolution, the chunked scan and a gated norm (arXiv
    2405.21060, section 6)."""
    space, tokens = work.model.state_space, work.tokens
    assert space is not None
    groups = max(1.0, space.groups / work.tensor_size)
    inner, states = space.inner / work.tensor_size, 2 * groups * space.state_size
    hidden = work.model.hidden
    into = linear_us(
        device, efficiency, tokens, hidden, 2 * inner + states + space.heads / work.tensor_size, recipe=work.recipe
    )
    out = linear_us(device, efficiency, tokens, inner, hidden, recipe=work.recipe)
    # Within chunks, masked attention; between chunks, states are carried: per token and head.
    per_token = 2 * (inner * _SCAN_CHUNK + states * _SCAN_CHUNK / 2) / 2 + 4 * inner * space.state_size
    scan = 2 * tokens * per_token / (device.peak_tflops * 1e6 * efficiency.attention_fraction)
    widths = inner, inner * space.state_size / _SCAN_CHUNK, states, groups * _SCAN_CHUNK
    forward, backward = (
        memory_pass_us(device, efficiency, tokens * sum(w * size for w, size in zip(widths, moved, strict=True)))
        for moved in (_SCAN_BYTES, _SCAN_BACKWARD_BYTES)
    )
    return Mixing(projections=into.plus(out), core=Times(scan + forward, 2.5 * scan + backward), launches=0.6)


def _linear_attention(work: Workload, device: Device, efficiency: Efficiency) -> Mixing:
    """Return the work of the gated delta rule in chunks (arXiv 2412.06464, section 3.3), with its projections and
    gates."""
    linear, tokens = work.model.linear, work.tokens
    assert linear is not None
    keys = linear.key_heads * linear.key_size / work.tensor_size
    values = linear.value_heads * linear.value_size / work.tensor_size
    hidden = work.model.hidden
    gated = 0.0 if linear.gate_rank else values
    into = linear_us(device, efficiency, tokens, hidden, 2 * keys + values + gated, recipe=work.recipe)
    for rank, width in ((linear.gate_rank, values), (linear.decay_rank, keys)):
        if rank:
            into = into.plus(linear_us(device, efficiency, tokens, hidden, rank, recipe=work.recipe))
            into = into.plus(linear_us(device, efficiency, tokens, rank, width, recipe=work.recipe))
    out = linear_us(device, efficiency, tokens, values, hidden, recipe=work.recipe)
    chunk = 64
    operations = 2 * tokens * values * (4 * linear.key_size + 3 * chunk)
    scan = operations / (device.peak_tflops * 1e6 * efficiency.attention_fraction)
    moved = _CONVOLUTION_PASSES * tokens * (2 * keys + 2 * values) * work.element_bytes
    if linear.decay_rank:
        # The gate is read, its sums over a chunk are written and read in fp32.
        moved += tokens * keys * (work.element_bytes + 8)
    passes = memory_pass_us(device, efficiency, moved)
    return Mixing(projections=into.plus(out), core=Times(scan + passes, 2.5 * scan + 2 * passes), launches=0.8)
