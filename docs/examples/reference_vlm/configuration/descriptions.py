"""The modules described by a model.json of MindSpeed-MM, as frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reference_vlm.configuration.stages import StageLayers


@dataclass(frozen=True, kw_only=True)
class StackDescription:
    """One stack of transformer layers and its stages. ``recompute_counts``: layers per chunk that are recomputed."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    normalization: str
    layernorm_epsilon: float
    activation: str
    gated: bool
    add_bias_linear: bool
    add_qkv_bias: bool
    freeze: bool
    stages: StageLayers
    recompute_granularity: str | None
    recompute_method: str
    recompute_counts: tuple[int, ...]
    hidden_dropout: float | None = None
    """None: the value of the command line."""
    attention_dropout: float | None = None


@dataclass(frozen=True, kw_only=True)
class VisionDescription:
    """The vision tower. ``window_size`` in pixels, 0 for full attention everywhere (Qwen2-VL)."""

    stack: StackDescription
    num_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    window_size: int
    full_attention_layers: tuple[int, ...]

    @property
    def token_features(self) -> int:
        """Return the number of pixel values for one token of the text."""
        patch = self.num_channels * self.temporal_patch_size * self.patch_size**2
        return patch * self.spatial_merge_size**2


@dataclass(frozen=True, kw_only=True)
class ProjectorDescription:
    """Norm, 2x2 merge and a two-layer MLP to the text decoder's width."""

    ffn_hidden_size: int
    activation: str
    freeze: bool


@dataclass(frozen=True, kw_only=True)
class AudioDescription:
    """The audio tower: two convolutions over mel frames, layers over chunks of 2 x ``num_window_frames`` frames."""

    stack: StackDescription
    num_mel_bins: int
    num_window_frames: int
    freeze_projector: bool


@dataclass(frozen=True, kw_only=True)
class TextDescription:
    """The language model. ``mrope_section`` is empty for ordinary rotary positions."""

    stack: StackDescription
    vocab_size: int
    rotary_base: int
    mrope_section: tuple[int, ...]
    max_position_embeddings: int
    untie_embeddings: bool


@dataclass(frozen=True, kw_only=True)
class GeneratorDescription:
    """The image head after the text decoder, on its last stage unless it has its own layout."""

    stack: StackDescription
    loss_weight: float


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """The whole model; ``vision``, ``audio`` or ``generator`` is ``None`` if the file has no such module."""

    file: Path
    vision: VisionDescription | None
    projector: ProjectorDescription | None
    audio: AudioDescription | None
    text: TextDescription
    image_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    audio_token_id: int
    audio_start_token_id: int
    audio_end_token_id: int
    own_layouts: frozenset[str] = frozenset()
    """Modules that train under their own layout (``--hetero-parallel``): on no stage of the text's pipeline."""
    generator: GeneratorDescription | None = None

    @property
    def virtual_size(self) -> int:
        return self.text.stack.stages.virtual_size
