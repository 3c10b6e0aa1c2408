"""Tied embeddings of a language model that begins after the first pipeline stage.

Megatron ties the embedding of the first stage to the output layer of the last. Under MindSpeed-MM the language model
begins at the stage that its ``pipeline_num_layers`` give; if the first stages hold only image layers, the group of both
hangs at start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.runtime.state import of_process


@dataclass
class EmbeddingStage:
    """The stage at which the language model of this process's plan begins."""

    pipeline_rank: int = 0
    """0: the stage that Megatron expects."""


def first_stage(layers: Sequence[int], pipeline_size: int, path: Path) -> int:
    """Return the pipeline rank on which the language model with ``layers`` by virtual stage begins.

    Raises ``PlanError``, naming the plan's ``path``, if it begins in a later chunk of a rank: MindSpeed-MM supports
    tied embeddings only in the first.
    """
    first = next(stage for stage, count in enumerate(layers) if count)
    if first >= pipeline_size:
        raise PlanError(
            f"{path}: the language model begins in virtual stage {first} of {len(layers)}, and MindSpeed-MM takes tied "
            f"embeddings from the first {pipeline_size} alone. Search without virtual stages "
            "(plan --virtual-sizes 1), or untie the embeddings."
        )
    return first


def place_embedding(layers: Sequence[int], pipeline_size: int, path: Path) -> None:
    """Record the pipeline rank on which the language model of a plan begins, see ``first_stage``."""
    of_process(EmbeddingStage).pipeline_rank = first_stage(layers, pipeline_size, path)


def tie_first_and_last(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Wrap ``initialize_model_parallel``: the embedding group contains the language model's first and last stage."""
    first = of_process(EmbeddingStage).pipeline_rank
    if not first or kwargs.get("get_embedding_ranks") is not None:
        return wrapped(*args, **kwargs)

    def embedding_ranks(ranks: Sequence[int], split_rank: int | None = None) -> list[int]:
        return sorted({ranks[first], ranks[-1]})

    return wrapped(*args, **{**kwargs, "get_embedding_ranks": embedding_ranks})


def send_embedding(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Wrap ``setup_embeddings_and_output_layer``: the model's first stage takes the role of the pipeline's."""
    result = wrapped(*args, **kwargs)
    instance = wrapped.__self__  # type: ignore[attr-defined]  # a bound method
    sends = instance.pre_process and not instance.post_process and instance.share_embeddings_and_output_weights
    if of_process(EmbeddingStage).pipeline_rank and sends:
        import torch
        from megatron.core import parallel_state

        weight = instance.shared_embedding_or_output_weight()
        # Its gradient is reduced with the last stage's: the distributed optimizer must shard both alike.
        weight.shared_embedding = True
        weight.data = weight.data.cuda()
        torch.distributed.all_reduce(weight.data, group=parallel_state.get_embedding_group())
    return result
