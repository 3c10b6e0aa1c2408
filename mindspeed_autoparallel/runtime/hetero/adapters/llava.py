"""Megatron-LM's LLaVA host (``pretrain_vlm.py``): its CLIP vision model under its own layout.

In model.json: ``"vision_model": {"tp": 1, "hetero": {"adapter":
"mindspeed_autoparallel.runtime.hetero.adapters.llava:LlavaVision"}}``. The projection stays in the language model's
layout: it is small, and its input has fewer elements to send than its output. An item is one image and one row.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.hetero.adapters.protocol import LocalItem


class LlavaVision:
    """Builds ``vision_model`` from the script's arguments as the script does; subclasses override ``vision_config``."""

    attributes = ("vision_model",)
    vision_model_type = "clip"

    def build(self, arguments: Any) -> Any:
        """Return a ``CLIPViTModel`` with ``--encoder-num-layers`` layers."""
        from megatron.core.models.vision.clip_vit_model import CLIPViTModel
        from megatron.core.models.vision.vit_layer_specs import (
            get_vit_layer_with_local_spec,
            get_vit_layer_with_transformer_engine_spec,
        )

        local = arguments.transformer_impl == "local"
        model = CLIPViTModel(
            self.vision_config(arguments),
            get_vit_layer_with_local_spec() if local else get_vit_layer_with_transformer_engine_spec(),
            img_h=arguments.img_h,
            img_w=arguments.img_w,
            patch_dim=arguments.patch_dim,
        )
        model.requires_grad_(not getattr(arguments, "freeze_ViT", False))
        return model

    def vision_config(self, arguments: Any) -> Any:
        """Return a copy of the language model's config with the vision model's layers and without a pipeline split."""
        from megatron.training.arguments import core_transformer_config_from_args

        config = copy.deepcopy(core_transformer_config_from_args(arguments))
        config.num_layers = arguments.encoder_num_layers
        config.vision_model_type = self.vision_model_type
        config.tp_comm_overlap = False
        # These sizes of the language model's stages would take layers from the vision model.
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
            setattr(config, name, None)
        if config.context_parallel_size > 1:
            raise ConfigError(
                f"vision_model: cp {config.context_parallel_size}: Megatron's CLIP model has no context parallelism; "
                "use cp 1 with a larger tp."
            )
        return config

    def adapter(self, module: Any, arguments: Any) -> LlavaAdapter:
        from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX

        return LlavaAdapter(module, arguments.params_dtype, DEFAULT_IMAGE_TOKEN_INDEX)


class LlavaAdapter:
    """``vision_model(images)``: ``[images, 3, height, width]`` -> ``[images, patches and class token, hidden]``."""

    meta_size = 0

    def __init__(self, module: Any, dtype: torch.dtype, image_token: int) -> None:
        self._token = image_token
        self.input_shape: tuple[int, ...] = (3, module.img_h, module.img_w)
        self.input_dtype = dtype
        self.output_shape: tuple[int, ...] = (module.seq_length, module.visual_hidden_size)
        self.output_dtype = dtype

    def items(self, batch: Mapping[str, torch.Tensor]) -> list[LocalItem]:
        """Return one image per sample, as in the script's data; ``ConfigError`` names a sample that has not exactly
        one image token."""
        counts = (batch["tokens"] == self._token).sum(dim=1).tolist()
        for sample, count in enumerate(counts):
            if count != 1:
                raise ConfigError(
                    f"sample {sample} of the microbatch has {count} image tokens ({self._token}) and 1 image. Every "
                    "sample of this host has exactly one."
                )
        return [LocalItem(sample, 1, 1, 1.0) for sample in range(len(counts))]

    def rows(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return batch["image"].cuda(non_blocking=True).to(self.input_dtype)

    def encode(self, module: Any, rows: torch.Tensor, items: Sequence[Any]) -> torch.Tensor:
        output: torch.Tensor = module(rows)
        return output

    def dummy(self) -> tuple[torch.Tensor, list[LocalItem]]:
        return torch.zeros((1, *self.input_shape), dtype=self.input_dtype).cuda(), [LocalItem(0, 1, 1, 1.0)]

    def embeddings(self, rows: torch.Tensor) -> torch.Tensor:
        return rows
