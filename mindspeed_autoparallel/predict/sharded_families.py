"""Models with other parts than a decoder and plain towers: Fun-ASR, Qwen3-TTS, and LTX-2's diffusion transformer."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_autoparallel.cost.analytic.blocks import (
    Block,
    Product,
    Stream,
    encoder_block,
    joined,
    ltx_exchange,
    ltx_stream,
    mlp_block,
    timestep_block,
)
from mindspeed_autoparallel.cost.analytic.fields import integer, part, switch
from mindspeed_autoparallel.predict.sharded_parts import Ends, Parts
from mindspeed_autoparallel.profiles.sharded import KEPT_PER_LOGIT

Values = Mapping[str, object]
LTX2, FUN_ASR, QWEN_TTS = "ltx2", "fun_asr_nano", "qwen3_tts"
_FEATURES = 560
"""Of a frame as Fun-ASR's encoder reads it: seven of 80 mel bins each."""
_CTC_WORDS, _CTC_WIDTH, _CTC_LAYERS = 60515, 512, 5
"""Fun-ASR's second decoder (``FunASRNano.__init__``, MindSpeed-MM's file): no loss reaches its parameters."""
_CONNECTOR_WIDTH, _CONNECTOR_BLOCKS = 3840, 4
"""LTX-2's text connectors: two of two layers, whole on every device in bf16, without gradients."""


def fun_asr_front(parts: Parts, config: Values, where: str, frames: int) -> None:
    """Add Fun-ASR's encoder and adaptor, in front of its decoder."""
    audio, adaptor = part(config, "audio_config"), part(config, "adaptor_config")
    heard, adapted = f"{where}: audio_config", f"{where}: adaptor_config"
    width, heads = integer(audio, "hidden_size", 512, heard), integer(audio, "num_attention_heads", 4, heard)
    ffn, memory = integer(audio, "intermediate_size", 2048, heard), integer(audio, "fsmn_kernel_size", 11, heard)
    layers = integer(audio, "num_hidden_layers", 70, heard)
    last = integer(audio, "num_timestamp_prediction_layers", 20, heard)
    parts.add("audio_encoder", Block(weights=4 * width), Ends(outputs=frames * width))
    first = encoder_block(frames, (_FEATURES, width), heads, ffn, memory)
    other = encoder_block(frames, (width, width), heads, ffn, memory)
    ends = Ends(inputs=frames * width, outputs=frames * width)
    parts.stack("audio_encoder.encoders0.{*}", 1, first, Ends(inputs=frames * _FEATURES, outputs=frames * width))
    parts.stack("audio_encoder.encoders.{*}", layers - last - 1, other, ends)
    parts.stack("audio_encoder.tp_encoders.{*}", last, other, ends)
    read = integer(adaptor, "hidden_size", 1024, adapted)
    between = mlp_block(frames, width, integer(adaptor, "projector_hidden_size", 2048, adapted), read, kept=1)
    parts.add("audio_adaptor", between, Ends(inputs=frames * width, outputs=frames * read))
    block = encoder_block(
        frames,
        (read, read),
        integer(adaptor, "num_attention_heads", 8, adapted),
        integer(adaptor, "intermediate_size", 256, adapted),
    )
    ends = Ends(inputs=frames * read, outputs=frames * read)
    parts.stack("audio_adaptor.blocks.{*}", integer(adaptor, "num_hidden_layers", 2, adapted), block, ends)
    ctc = encoder_block(1, (_CTC_WIDTH, _CTC_WIDTH), 8, _CTC_WIDTH // 4).parameters * _CTC_LAYERS
    ctc += mlp_block(1, _CTC_WIDTH, 2048, _CTC_WIDTH).parameters + (_CTC_WIDTH + 1) * _CTC_WORDS
    parts.add("ctc_decoder", Block(), Ends(), unused=ctc)
    parts.notes.append(f"audio_encoder: {frames} frames per sample, padded and joined to no batch of tokens")


def qwen_tts_front(parts: Parts, talker: Values, where: str) -> None:
    """Add Qwen3-TTS' table of text in front of the talker; its projection is no part of the training's forward."""
    words, width = integer(talker, "text_vocab_size", 151936, where), integer(talker, "text_hidden_size", 2048, where)
    hidden = integer(talker, "hidden_size", None, where)
    unused = width * width + width + width * hidden + hidden
    parts.add("talker.text_projection", Block(), Ends(), parent="talker", unused=unused)
    parts.add("talker.model.text_embedding", Block(weights=words * width), Ends())
    parts.notes.append("the speaker's encoder, 1 % of the parameters and without gradient, is left out")


def qwen_tts_back(parts: Parts, talker: Values, where: str, tokens: int) -> int:
    """Add what predicts the other codes of a position, without its layers; return a position's codes."""
    inner, codes = part(talker, "code_predictor_config"), integer(talker, "num_code_groups", 16, where)
    words, hidden = integer(inner, "vocab_size", 2048, where), integer(inner, "hidden_size", 1024, where)
    read, rows = integer(talker, "hidden_size", None, where), tokens * codes
    into = Product(rows, read, hidden)
    others = codes - 1
    logits = tokens * others * words
    block = Block(
        products=(into,) if read != hidden else (),
        passed_bytes=4 * rows * read,
        kernels=4 + codes,
        weights=others * words * read + (others - 1) * words * hidden + hidden,
        saved_bytes=2 * rows * read,
        widest=rows * read,
    )
    heads = Block(
        products=(Product(others * tokens, hidden, words, bias=False),),
        passed_bytes=3 * 2 * logits,
        kernels=2 * others,
        saved_bytes=KEPT_PER_LOGIT * logits + 2 * rows * hidden,
        widest=4 * logits,
    )
    ends = Ends(inputs=tokens * read, outputs=rows * hidden)
    parts.add("talker.code_predictor", block, ends, parent="talker", tail=heads)
    parts.keep_from_units()  # the model calls its tables, and the talker its ``forward_finetune``
    return codes


def ltx2_parts(parts: Parts, config: Values, where: str, tokens: int) -> int:
    """Add LTX-2's transformer of ``tokens`` of video per sample; return bytes that every device holds beside it.

    ``with_audio``: whether samples have sound (``audio_tokens``); else its parameters are there and get no gradient.
    """
    sounds = bool(switch(config, "with_audio", False, where))
    text, words = integer(config, "text_tokens", 1024, where), integer(config, "caption_channels", 3840, where)

    def stream(prefix: str, count: int, head_size: int) -> Stream:
        heads = integer(config, f"{prefix}num_attention_heads", 32, where)
        size = integer(config, f"{prefix}attention_head_dim", head_size, where)
        width = integer(config, f"{prefix}cross_attention_dim", 32 * head_size, where)
        return Stream(count, heads, size, text, width)

    video, audio = stream("", tokens, 128), stream("audio_", integer(config, "audio_tokens", 64, where), 64)
    channels = integer(config, "in_channels", 128, where)
    own = joined((timestep_block(tokens, video.width, 6), Block(weights=2 * video.width)))
    sound = joined(
        (
            timestep_block(audio.tokens, audio.width, 6),
            timestep_block(audio.tokens, audio.width, 4),
            timestep_block(audio.tokens, audio.width, 1),
            timestep_block(tokens, video.width, 4),
            timestep_block(tokens, video.width, 1),
            mlp_block(audio.tokens, channels, audio.width),
            mlp_block(text, words, audio.width, audio.width),
            mlp_block(audio.tokens, audio.width, channels),
            Block(weights=2 * audio.width),
        )
    )
    whole = joined((own, sound)) if sounds else own
    rows, width = tokens * video.width, video.width
    parts.add("transformer", whole, Ends(outputs=rows), unused=0 if sounds else sound.parameters)
    parts.add("transformer.patchify_proj", mlp_block(tokens, channels, width), Ends(outputs=rows), parent="transformer")
    caption = mlp_block(text, words, width, width)
    parts.add("transformer.caption_projection", caption, Ends(outputs=text * width), parent="transformer")
    seen, heard = ltx_stream(video), joined((ltx_stream(audio), ltx_exchange(video, audio)))
    block = joined((seen, heard)) if sounds else seen
    state = rows + sounds * audio.tokens * audio.width
    parts.stack(
        "transformer.transformer_blocks.{*}",
        integer(config, "num_layers", 48, where),
        block,
        Ends(inputs=state, outputs=state),
        unused=0 if sounds else heard.parameters,
    )
    out = mlp_block(tokens, width, integer(config, "out_channels", 128, where))
    parts.add("transformer.proj_out", out, Ends(inputs=rows, outputs=tokens * channels), parent="transformer")
    heard_too = f", {audio.tokens} of sound" if sounds else ""
    parts.notes.append(f"transformer: {tokens} tokens of video{heard_too} and {text} of text per sample")
    return 2 * 12 * _CONNECTOR_BLOCKS * _CONNECTOR_WIDTH**2
