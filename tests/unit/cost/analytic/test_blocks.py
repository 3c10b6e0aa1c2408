"""Blocks as lists of operators, beside the modules that they describe: parameters, operations and what torch saves."""

import importlib.util
import os
import sys
import types
from pathlib import Path

import pytest

from mindspeed_autoparallel.cost.analytic.blocks import Block, Stream, encoder_block, joined, ltx_exchange, ltx_stream
from mindspeed_autoparallel.cost.catalogue import find_device

torch = pytest.importorskip("torch")
VIDEO, AUDIO = Stream(64, 4, 32, 40, 128), Stream(24, 4, 16, 40, 64)
WITH_SOUND = joined((ltx_stream(VIDEO), ltx_stream(AUDIO), ltx_exchange(VIDEO, AUDIO)))
BLOCKS = {False: ltx_stream(VIDEO), True: WITH_SOUND}


def saved_bytes(run, *given):
    """Return the bytes of the storages that ``run`` saves for backward, without those of ``given``."""
    known = {one.untyped_storage().data_ptr() for one in given}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(size for size, _ in seen.values())


def operations(run):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("memory", [0, 11])
def test_layers_of_fun_asr_are_those_of_transformers(memory):
    folder = "transformers.models.fun_asr_nano"
    models = pytest.importorskip(f"{folder}.modeling_fun_asr_nano")
    configs = importlib.import_module(f"{folder}.configuration_fun_asr_nano")
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256}
    sizes |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    if memory:
        config = configs.FunAsrNanoEncoderConfig(fsmn_kernel_size=memory, **sizes)
    else:
        config = configs.FunAsrNanoAdaptorConfig(**sizes)
    config._attn_implementation = "sdpa"
    layer = models.FunAsrNanoEncoderLayer(config, use_fsmn=bool(memory)).to(torch.bfloat16)
    frames, mask = torch.randn(1, 48, 128, dtype=torch.bfloat16, requires_grad=True), torch.ones(1, 48)
    mask = mask.to(torch.bfloat16)
    block = encoder_block(48, (128, 128), 4, 256, memory)
    assert block.parameters == sum(weight.numel() for weight in layer.parameters())
    assert operations(lambda: layer(frames, None, mask)) == pytest.approx(block.operations, rel=0.02)
    assert saved_bytes(lambda: layer(frames, None, mask), frames, mask, *layer.parameters()) == block.saved_bytes


@pytest.mark.parametrize(("sound", "saved"), [(False, 851_618), (True, 1_355_304)])
def test_ltx2_saves_what_its_own_code_saved(sound, saved):
    """Bytes of the test below, counted with ltx_core at 28c3c73 and MindSpeed-MM's ``block_forward``."""
    assert BLOCKS[sound].saved_bytes == saved


def _ltx_block(sources: Path, host: Path):
    sys.path.insert(0, str(sources))
    from ltx_core.model.transformer.rope import LTXRopeType
    from ltx_core.model.transformer.transformer import BasicAVTransformerBlock, TransformerConfig

    file = host / "mindspeed_mm/fsdp/models/ltx2/ltx2_fsdp2/modified.py"
    spec = importlib.util.spec_from_file_location("modified", file)
    assert spec and spec.loader
    modified = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(modified)
    configs = [
        TransformerConfig(dim=one.width, heads=one.heads, d_head=one.head_size, context_dim=one.text_width)
        for one in (VIDEO, AUDIO)
    ]
    block = BasicAVTransformerBlock(idx=0, video=configs[0], audio=configs[1], rope_type=LTXRopeType.SPLIT)
    block = block.to(torch.bfloat16)
    for weight in block.parameters():
        torch.nn.init.normal_(weight)
    block.forward = types.MethodType(modified.block_forward, block)
    return block


def _ltx_inputs(sound):
    def drawn(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)

    def angles(stream, size):
        return tuple(torch.randn(1, stream.heads, stream.tokens, size // 2, dtype=torch.bfloat16) for _ in range(2))

    given = {"ax": None, "audio_enabled": sound}
    for name, stream in (("video", VIDEO), ("audio", AUDIO)):
        if name == "audio" and not sound:
            continue
        rows, width = stream.tokens, stream.width
        given |= {
            f"{name[0]}x": drawn(1, rows, width),
            f"{name}_timesteps": drawn(1, rows, 6 * width),
            f"{name}_positional_embeddings": angles(stream, stream.head_size),
            f"{name}_context": drawn(1, stream.text_tokens, stream.text_width),
        }
        if sound:
            given |= {
                f"{name}_cross_scale_shift_timestep": drawn(1, rows, 4 * width),
                f"{name}_cross_gate_timestep": drawn(1, rows, width),
                f"{name}_cross_positional_embeddings": angles(stream, AUDIO.head_size),
            }
    return given


@pytest.mark.skipif(
    not {"LTX2_SOURCES", "MINDSPEED_MM"} <= set(os.environ), reason="LTX2_SOURCES (ltx-core/src), MINDSPEED_MM: unset"
)
@pytest.mark.parametrize("sound", [False, True])
def test_ltx2_blocks_are_those_of_its_own_code(sound):
    block = _ltx_block(Path(os.environ["LTX2_SOURCES"]), Path(os.environ["MINDSPEED_MM"]))
    ours, given = BLOCKS[sound], _ltx_inputs(sound)
    flat = [one for value in given.values() for one in (value if isinstance(value, tuple) else (value,))]
    tensors = [one for one in flat if isinstance(one, torch.Tensor)]
    assert WITH_SOUND.parameters == sum(weight.numel() for weight in block.parameters())
    assert operations(lambda: block(**given)) == ours.operations
    assert saved_bytes(lambda: block(**given), *tensors, *block.parameters()) == ours.saved_bytes


def test_samples_take_no_longer_together_than_one_by_one():
    device = find_device("910B")
    efficiency = device.efficiency("megatron-core")
    few, one, two = (WITH_SOUND.times(device, efficiency, samples).forward_us for samples in (1, 8192, 16384))
    assert few == efficiency.launch_us * WITH_SOUND.kernels / 25
    assert few < one < two <= 2 * one
    assert Block().times(device, efficiency, 1).forward_us == 0
