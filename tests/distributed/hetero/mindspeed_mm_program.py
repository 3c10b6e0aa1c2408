"""A training script as MindSpeed-MM's: ``model_provider(modules=...)`` and a VLMModel with its interface, made of the
reference model's parts. Its own hetero parallel would begin wherever ``args.hetero_parallel`` is seen: it raises."""

# ruff: noqa: I001
import mindspeed_autoparallel  # noqa: F401  before Megatron

import json
import sys
import types
from pathlib import Path

import torch
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args

from reference_vlm import arguments as own_arguments
from reference_vlm import pretrain_vlm
from reference_vlm.data.batches import STAND_IN_FRAMES
from reference_vlm.model.audio import AudioEncoder
from reference_vlm.model.vision import ImageEncoder
from reference_vlm.model.vlm import VisionLanguageModel, current_chunk, put_at_tokens
from mindspeed_autoparallel.runtime.hetero.adapters import mindspeed_mm
from mindspeed_autoparallel.runtime.hetero.job import current_job

sys.modules["mindspeed_mm"] = types.ModuleType("mindspeed_mm")
TRAINER = []


class PaddedAudioEncoder(AudioEncoder):
    """Takes clips as MindSpeed-MM does: ``input_features [clips, mel, frames]`` and a mask ``[clips, frames]``."""

    def forward(self, input_features, feature_attention_mask):
        frames = input_features.permute(0, 2, 1)[feature_attention_mask.bool()]
        return super().forward(frames.T, feature_attention_mask.sum(dim=1)).flatten(1)


class VLMModel(VisionLanguageModel):
    """``image_encoder``, ``audio_encoder`` and ``text_decoder``, each if ``modules`` names it."""

    def __init__(self, base, description, vocab_size, chunk, modules):
        if get_args().hetero_parallel:
            raise AssertionError("MindSpeed-MM's own hetero parallel begins")
        super().__init__(base, description, vocab_size, chunk)
        self.add_image_encoder = "image_encoder" in modules
        self.add_audio_encoder = "audio_encoder" in modules
        self.image_encoder = ImageEncoder(base, description, 0) if self.add_image_encoder else None
        if self.add_image_encoder:
            # The real one has its block of model.json here, and records of the host's own in its parts.
            for part in self.image_encoder.modules():
                if hasattr(part, "config"):
                    part.config = types.SimpleNamespace(**vars(part.config))
            # What our stand-in's own forward reads of it.
            self.image_encoder.config = types.SimpleNamespace(
                context_parallel_size=base.context_parallel_size, sequence_parallel=False
            )
        self.audio_encoder = PaddedAudioEncoder(base, description, 0) if self.add_audio_encoder else None
        if "text_decoder" not in modules:
            self.text_decoder = None

    def set_input_tensor(self, input_tensor):
        assert not (self.add_image_encoder and input_tensor[0] is not None), "the encoder is on the first stage only"
        super().set_input_tensor(input_tensor)

    def forward(self, input_ids, position_ids, labels, pixel_values, image_grid_thw, **audio):
        if not self.pre_process:
            assert not self.add_image_encoder
            self.text_decoder.set_input_tensor(self.received)
            return self._decode(input_ids, position_ids, None, labels, None, None)
        embeddings = self.text_decoder.embedding(input_ids=input_ids, position_ids=position_ids)
        if self.add_image_encoder and pixel_values is not None:
            rows = self.image_encoder(pixel_values, image_grid_thw)
            rows = rows.reshape(-1, 1, rows.shape[-1]).clone()
            embeddings = put_at_tokens(embeddings, rows, input_ids == self.description.image_token_id)
        if "input_features" in audio:
            rows = self.audio_encoder(audio["input_features"], audio["feature_attention_mask"])
            embeddings = put_at_tokens(embeddings, rows[:, None], input_ids == self.description.audio_token_id)
        return self._decode(input_ids, position_ids, embeddings, labels, None, None)


def model_provider(pre_process=True, post_process=True, modules=None, vp_stage=None):
    """As in MindSpeed-MM's script: builds the requested modules under the current parallel state."""
    args, model = get_args(), TRAINER[0].model
    base = core_transformer_config_from_args(args)
    base.num_layers, base.variable_seq_lengths = model.text.stack.num_layers, args.pipeline_model_parallel_size > 1
    vocab_size = own_arguments.padded_vocab_size(args, model)
    modules = modules or ["image_encoder", "audio_encoder", "text_decoder"]
    return VLMModel(base, model, vocab_size, current_chunk(vp_stage), modules)


class Trainer(pretrain_vlm.Trainer):
    """The reference training with this model and batches as MindSpeed-MM's data loader makes them."""

    def __init__(self, model):
        super().__init__(model)
        TRAINER.append(self)
        mindspeed_mm.AUDIO_TOKEN = model.audio_token_id
        # MindSpeed-MM keeps the model description in its arguments.
        described = json.loads(Path(model.file).read_text(), object_hook=lambda block: types.SimpleNamespace(**block))
        current_job().arguments.mm = types.SimpleNamespace(model=described)

    def build(self, pre_process=True, post_process=True, vp_stage=None, modules=None, **unused):
        return model_provider(pre_process, post_process, modules, vp_stage)

    def data(self, num_samples, vp_stage=None):
        batches, *rest = super().data(num_samples, vp_stage)
        return (_as_mindspeed_mm(batch) for batch in batches), *rest

    data.is_distributed = True


def _as_mindspeed_mm(batch):
    batch = dict(batch)
    lengths, features = batch.pop("audio_num_frames").tolist(), batch.pop("audio_features")
    clips = [clip.T for clip in features.split(lengths, dim=1)]
    # Without a clip the reference's batches carry a stand-in, MindSpeed-MM's carry nothing.
    if lengths != [STAND_IN_FRAMES]:
        batch["input_features"] = torch.nn.utils.rnn.pad_sequence(clips, batch_first=True).permute(0, 2, 1)
        batch["feature_attention_mask"] = (torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]).to(
            torch.int32
        )
    return batch


def main():
    pretrain_vlm.Trainer = Trainer
    pretrain_vlm.main()


if __name__ == "__main__":
    main()
