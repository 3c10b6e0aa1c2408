"""Train the reference model through ``megatron.training.pretrain``.

``torchrun docs/examples/pretrain_vlm.py --mm-model model.json --mm-data data.json ...`` runs ``main``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.utils import get_model_config
from megatron.training import arguments as host_arguments
from megatron.training import get_args, global_vars
from megatron.training import training as host_training

from mindspeed_autoparallel.errors import told_in_a_line
from mindspeed_autoparallel.runtime.hetero.job import current_job
from reference_vlm import arguments as own_arguments
from reference_vlm import hetero
from reference_vlm.configuration import ModelDescription, read_data
from reference_vlm.data.batches import Batch, MicrobatchStream, StreamOptions
from reference_vlm.data.rearrange import Rearrangement, make_rearrangement
from reference_vlm.data.records import Record, read_records, split_records
from reference_vlm.data.tokens import make_tokenizer
from reference_vlm.model.checks import check_layers, check_parameters
from reference_vlm.model.context import check_length, over_context, own_tokens
from reference_vlm.model.vlm import VisionLanguageModel, current_chunk

LossAndReport = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


class Trainer:
    """The functions that Megatron needs from a training script, for one described model."""

    def __init__(self, model: ModelDescription) -> None:
        self.model = model
        self._built: list[VisionLanguageModel] = []

    def build(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **unused: Any
    ) -> VisionLanguageModel:
        """Return Megatron's ``model_provider``: the chunk of this rank and virtual stage, checked against the
        description."""
        args = get_args()
        base = host_arguments.core_transformer_config_from_args(args)
        base.dropout_seed = args.seed
        base.num_layers = self.model.text.stack.num_layers
        # Encoder rows and text differ in shape, and images in size: stages exchange shapes.
        base.variable_seq_lengths = mpu.get_pipeline_model_parallel_world_size() > 1
        vocab_size = own_arguments.padded_vocab_size(args, self.model)
        chunk = VisionLanguageModel(base, self.model, vocab_size, current_chunk(vp_stage))
        check_parameters(chunk, self.model, vocab_size)
        self._built.append(chunk)
        if len(self._built) == self.model.virtual_size:
            check_layers(self._built, self.model)
            self._built = []
        return chunk

    def data(
        self, num_samples: Any, vp_stage: int | None = None
    ) -> tuple[Iterator[Batch], Iterator[Batch] | None, None]:
        """Return Megatron's dataset provider (``--dataloader-type external``): this rank's endless microbatches, to
        train and, if data.json keeps records for it, to evaluate."""
        from pathlib import Path

        args = get_args()
        data = read_data(Path(args.mm_data))
        model = self.model
        ids = {"img_context_token_id": model.image_token_id, "vision_start_token_id": model.vision_start_token_id}
        tokenizer = make_tokenizer(data.tokenizer, ids, model.text.vocab_size)
        tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
        multiple = (tensor if args.sequence_parallel else 1) * (2 * context if context > 1 else 1)

        def stream(records: Sequence[Record], start: int, rearranged: Rearrangement | None) -> Iterator[Batch]:
            batches = MicrobatchStream(
                records,
                model,
                data,
                tokenizer,
                StreamOptions(
                    size=args.micro_batch_size,
                    rank=mpu.get_data_parallel_rank(),
                    num_ranks=mpu.get_data_parallel_world_size(),
                    start=start,
                    seed=args.seed,
                    max_tokens=args.seq_length,
                    pad_to_longest=own_arguments.pads_to_longest(args),
                    multiple=multiple,
                    with_identities=own_arguments.drops(args, model),
                    is_packed=args.pack_samples,
                ),
                rearrangement=rearranged,
            )
            return iter(batches)

        to_train, to_evaluate = split_records(read_records(data), data.val_rate)
        evaluation = stream(to_evaluate, args.consumed_valid_samples, None) if to_evaluate else None
        size = mpu.get_data_parallel_world_size()
        rearranged = None
        if getattr(args, "data_balance", False):
            # Every virtual stage has its own stream: one of them reports.
            is_logged = args.rank == 0 and not vp_stage
            rearranged = make_rearrangement(args, model, data, tokenizer, size, is_logged)
            if rearranged.shape.max_tokens < args.seq_length:
                rearranged.check_fits(to_train)
        return stream(to_train, args.consumed_train_samples, rearranged), evaluation, None

    # Every rank reads the data itself: all stages need the texts, and nothing is broadcast.
    data.is_distributed = True  # type: ignore[attr-defined]  # Megatron looks for this attribute of the function

    def step(
        self, batches: Iterator[Batch], model: Any
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossAndReport]]:
        """Return Megatron's ``forward_step``: one microbatch through one chunk."""
        batch = {name: tensor.cuda(non_blocking=True) for name, tensor in next(batches).items()}
        loss_mask = own_tokens(batch.pop("loss_mask"), 1)
        by_token = get_model_config(model).calculate_per_token_loss
        generator = self.model.generator
        return model(**batch), partial(token_loss, loss_mask, by_token, generator.loss_weight if generator else 0.0)

    def embedding_ranks(self, ranks: list[int], *unused: Any) -> list[int]:
        """Return the pipeline ranks that hold a tied embedding: the text decoder's first and the last."""
        first = self.model.text.stack.stages.first_chunk % len(ranks)
        return sorted({ranks[first], ranks[-1]})


def token_loss(
    loss_mask: torch.Tensor,
    by_token: bool,
    generator_weight: float,
    losses: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
) -> LossAndReport:
    """Sum of the wanted tokens' losses and their number; Megatron divides. ``losses``, ``loss_mask``: ``[b, s / cp]``.

    ``by_token``: Megatron divides by the tokens of the whole step instead of each microbatch's. With a generator
    ``losses`` also has the losses of its rows; they are weighted and added to the sum, and the number counts tokens
    only.
    """
    generated = None
    if not isinstance(losses, torch.Tensor):
        losses, generated = losses
    total = torch.sum(losses.float() * loss_mask)
    num_tokens = loss_mask.sum().to(torch.int)
    if mpu.get_context_parallel_world_size() == 1:
        num_tokens = num_tokens.clamp(min=1)
    reports = {"lm loss": torch.stack((total.detach().clone(), num_tokens.to(torch.float)))}
    if generated is not None:
        total = total + generator_weight * generated.sum()
        num_rows = torch.tensor(float(generated.numel()), device=total.device)
        reports["image_generator loss"] = torch.stack((generated.detach().sum(), num_rows))
    if not by_token:
        total, num_tokens = over_context(total, num_tokens)
    return total, num_tokens, reports


def main() -> None:
    """Parse, describe, train. A mistake of the user ends with its message and exit code 2, without a traceback."""
    if not hasattr(host_arguments, "parse_and_validate_args"):
        raise SystemExit(
            "ConfigError: this megatron.training has another entry than the reference training knows. Install "
            "megatron-core 0.19, or train with MindSpeed-MM on older releases."
        )
    with told_in_a_line():
        args = host_arguments.parse_args(own_arguments.add_arguments)
        trainer = Trainer(own_arguments.describe(args))
        if current_job().layout is not None:
            current_job().offer(hetero.hosts(trainer.model))
            current_job().check_hosts()
        host_arguments.validate_args(args, {})
        own_arguments.settle(args, trainer.model)
        global_vars.set_global_variables(args)
        _train(trainer, args)


def _train(trainer: Trainer, args: Any) -> None:
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    sequence_split = args.tensor_model_parallel_size if args.sequence_parallel else 1
    check_length(args.seq_length, args.context_parallel_size, sequence_split)
    host_training.pretrain(
        pretrain_cfg_container_from_args(args),
        trainer.data,
        ModelType.encoder_or_decoder,
        trainer.step,
        model_provider=trainer.build,
        get_embedding_ranks=trainer.embedding_ranks,
    )


if __name__ == "__main__":
    main()
