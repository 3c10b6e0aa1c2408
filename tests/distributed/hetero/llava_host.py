"""Megatron's own LLaVA model as a host for the oracle: CLIP vision model, projection, GPT; one image per sample."""

import argparse

import host
import torch
from megatron.core import tensor_parallel
from megatron.core.models.multimodal import llava_model
from megatron.core.models.multimodal.llava_spec import decoder_model_with_local_default_spec
from megatron.core.models.vision import clip_vit_model
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from mindspeed_autoparallel.runtime.hetero.adapters.llava import LlavaVision

fill, config = host.fill, host.config
SIDE, PATCH_SIDE, TEXT = 8, 4, 11
IMAGE_ROWS = (SIDE // PATCH_SIDE) ** 2 + 1
# The image token of the text becomes the image's rows.
SEQUENCE = TEXT - 1 + IMAGE_ROWS
# Numbers in one row, for the bytes that travel.
PATCH, HIDDEN = 3 * SIDE * SIDE, IMAGE_ROWS * host.HIDDEN

# torch's LayerNorm, the default without Transformer Engine, does not take Megatron's arguments.
clip_vit_model.CLIPViTModel.__init__.__defaults__ = tuple(
    WrappedTorchNorm if value is torch.nn.LayerNorm else value
    for value in clip_vit_model.CLIPViTModel.__init__.__defaults__
)


def samples(count, text_only=()):
    generator = torch.Generator().manual_seed(3)
    found = []
    for index in range(count):
        tokens = torch.randint(1, host.VOCABULARY, (TEXT,), generator=generator)
        tokens[index % TEXT] = llava_model.DEFAULT_IMAGE_TOKEN_INDEX
        labels = torch.randint(0, host.VOCABULARY, (TEXT,), generator=generator)
        pixels = torch.randn(3, SIDE, SIDE, generator=generator)
        found.append({"tokens": tokens, "labels": labels, "pixels": pixels})
    return found


def batches(data, *which):
    for batch in host.batches(data, *which):
        yield {
            "image": torch.stack([sample["pixels"] for sample in batch]),
            **{key: torch.stack([sample[key] for sample in batch]) for key in ("tokens", "labels")},
        }


class Vision(LlavaVision):
    """The adapter's, with the oracle's config."""

    def __init__(self, cfg):
        self.cfg = cfg

    def vision_config(self, arguments):
        self.cfg.vision_model_type = self.vision_model_type
        return self.cfg


def make_encoder(cfg):
    arguments = argparse.Namespace(transformer_impl="local", img_h=SIDE, img_w=SIDE, patch_dim=PATCH_SIDE)
    return Vision(cfg).build(arguments)


def make_adapter(dtype, module):
    return Vision(None).adapter(module, argparse.Namespace(params_dtype=dtype))


ImageEncoder, ImageAdapter = make_encoder, make_adapter


class VisionLanguageModel(llava_model.LLaVAModel):
    def __init__(self, encoder, cfg, *, pre, post, vp_stage=None):
        vision = config(1)
        vision.vision_model_type = "clip"
        super().__init__(
            language_transformer_config=cfg,
            language_transformer_layer_spec=decoder_model_with_local_default_spec(None, False),
            language_vocab_size=host.VOCABULARY,
            language_max_sequence_length=SEQUENCE,
            vision_transformer_config=vision,
            vision_transformer_layer_spec=get_vit_layer_with_local_spec(),
            drop_vision_class_token=False,
            vision_projection_config=config(1, tensor=cfg.tensor_model_parallel_size),
            vision_projection_layer_spec=MLPSubmodules(
                linear_fc1=tensor_parallel.ColumnParallelLinear, linear_fc2=tensor_parallel.RowParallelLinear
            ),
            pre_process=pre,
            post_process=post,
            add_encoder=pre,
            img_h=SIDE,
            img_w=SIDE,
            patch_dim=PATCH_SIDE,
        )
        self.vision_model = encoder

    @property
    def text_decoder(self):
        """What belongs to the backbone."""
        parts = {"language_model": self.language_model, "vision_projection": self.vision_projection}
        return torch.nn.ModuleDict({name: part for name, part in parts.items() if part is not None})

    @property
    def image_encoder(self):
        return self.vision_model


def forward_step(losses, per_token=False):
    def step(iterator, model):
        batch = next(iterator)
        tokens = batch["tokens"]
        positions = torch.arange(TEXT).expand_as(tokens)
        output, loss_mask = model(
            batch["image"], tokens, positions, None, batch["labels"], torch.ones_like(tokens, dtype=torch.float32)
        )

        def loss_function(per_token_loss, *args, **kwargs):
            total = (per_token_loss.float() * loss_mask).sum() / (tokens.numel() * 1.0)
            losses.append(total.item())
            return total, {"loss": total.detach()}

        return output, loss_function

    return step
