"""A Hugging Face folder with random weights of any supported family and size, written tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.weights import names
from mindspeed_autoparallel.weights.architecture import architecture_from_config
from mindspeed_autoparallel.weights.names import nested_name
from mindspeed_autoparallel.weights.placement import entries_of
from mindspeed_autoparallel.weights.shard_writer import DEFAULT_SHARD_BYTES, ShardWriter


def write_random_model(
    folder: Path,
    config: dict[str, object],
    *,
    seed: int = 0,
    dtype: str = "float32",
    scale: float = 1.0,
    nested: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write a random model. ``config``: flat text keys plus ``vision_config`` and ``audio_config`` as the family has
    them.

    Values are normal with standard deviation ``scale``, those of norms around 1.
    """
    import torch

    folder.mkdir(parents=True)
    write_json_atomic(folder / "config.json", config)
    generator = torch.Generator().manual_seed(seed)
    omni = config["model_type"] == "qwen2_5_omni"
    shapes = list(shapes_of(config))
    writer = ShardWriter(folder, max_shard_bytes, [f"model.language_model.{name}" for name, _ in shapes])
    for classic, shape in shapes:
        # Without a thinker in front the names would be those of the text family.
        name = f"thinker.{classic}" if omni else nested_name(classic) if nested else classic
        values = torch.randn(shape, generator=generator).mul_(scale)
        if len(shape) == 1 and name.endswith(".weight"):
            values += 1.0
        writer.add(name, [values.to(getattr(torch, dtype))])
    writer.finish()


def shapes_of(config: dict[str, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor in the files of a model, the classic form of names."""
    architecture = architecture_from_config(config, "config.json")
    for entry in entries_of(architecture):
        if names.is_output_layer(entry.rule) and architecture.tied_embeddings:
            continue
        for shape, source in zip(entry.rule.shapes, entry.sources, strict=True):
            if not source.endswith("[e]"):
                yield source, shape
            elif entry.expert == 0:
                yield source.removesuffix("[e]"), (architecture.modules[entry.rule.module].num_experts, *shape)
