"""A GPT or mixture-of-experts training of Megatron 0.19 as users write it; this package adds two imports."""

import functools

import mindspeed_autoparallel  # noqa: F401  # first: before megatron

# isort: split
import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset, MockGPTLowLevelDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

from mindspeed_autoparallel.runtime.attention.context_parallel import use_in_spec

MockGPTLowLevelDataset.size = 1_000  # texts; every rank shuffles all samples of them, which takes long for 100,000
KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def model_provider(pre_process=True, post_process=True, vp_stage=None, **unused):
    """The model's part on one pipeline stage."""
    args = get_args()
    config = core_transformer_config_from_args(args)
    spec = get_gpt_layer_local_spec(normalization=args.normalization)
    if args.num_experts:
        # --moe-layer-freq says which layers have experts.
        spec = get_gpt_decoder_block_spec(config, False, normalization=args.normalization, vp_stage=vp_stage)
    if args.context_parallel_size > 1:
        spec = use_in_spec(spec)  # Megatron's local attention takes none; Transformer Engine's does
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
    )


def loss_function(loss_mask, losses):
    """Sum over this rank's tokens and their number; Megatron divides."""
    mask = loss_mask.view(-1).float()
    loss, num_tokens = torch.sum(losses.view(-1).float() * mask), mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack((loss.detach().clone(), num_tokens.float()))}


def forward_step(data_iterator, model, *unused):
    """One microbatch through one stage."""
    batch = dict.fromkeys(KEYS)
    if parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage():
        read = next(data_iterator)
        batch = {key: read[key].cuda(non_blocking=True) for key in KEYS}
        group = parallel_state.get_context_parallel_group()
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, functools.partial(loss_function, batch["loss_mask"])


def datasets_provider(num_samples, vp_stage=None):
    """Mock tokens, on the ranks that read."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        split="99,1,0",
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda *unused: True, config).build()


datasets_provider.is_distributed = True  # every rank reads its own samples

if __name__ == "__main__":
    pretrain(
        pretrain_cfg_container_from_args(parse_and_validate_args()),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider=model_provider,
    )
