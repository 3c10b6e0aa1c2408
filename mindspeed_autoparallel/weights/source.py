"""Interface of every reader of weights: canonical tensors by name, loaded one at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.weights import names, tensors
from mindspeed_autoparallel.weights.architecture import Architecture
from mindspeed_autoparallel.weights.placement import Entry, entries_of

# (tensors done, tensors in all, what is being written)
Progress = Callable[[int, int, str], None]


class TensorSource(Protocol):
    """A checkpoint opened for reading. Tensors may be mapped from the file: do not write to them."""

    architecture: Architecture

    def has(self, entry: Entry) -> bool: ...

    def blocks(self, entry: Entry) -> Sequence[Any]:
        """Return tensors whose concatenated rows are those of ``entry``: nothing is copied to join them."""
        ...

    def load(self, entry: Entry) -> Any:
        """Return one tensor."""
        return tensors.whole(self.blocks(entry))


def present_entries(source: TensorSource, absent: tuple[str, ...] = ()) -> list[Entry]:
    """Return the canonical tensors ``source`` has; a ``ConfigError`` names the first missing ones.

    ``absent``: suffixes of names that may be missing.
    """
    present, missing = [], []
    for entry in entries_of(source.architecture):
        if source.has(entry):
            present.append(entry)
        elif not (entry.rule.untrained or entry.name.endswith(absent)) and not (
            names.is_output_layer(entry.rule) and source.architecture.tied_embeddings
        ):
            missing.append(entry.name)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(
            f"{len(missing)} tensor(s) are missing: {', '.join(missing[:3])}{more}. "
            "The checkpoint is incomplete, or config.json belongs to another model."
        )
    return present


def stored_entries(source: TensorSource) -> list[Entry]:
    """Return ``present_entries`` without an output layer that is tied to the embedding: files have its values once."""
    tied = source.architecture.tied_embeddings
    return [entry for entry in present_entries(source) if not (tied and names.is_output_layer(entry.rule))]


def refuse_unknown(names_: Iterable[str], known: Collection[str], architecture: Architecture, where: object) -> None:
    """Raise ``ConfigError`` for tensors of a checkpoint that the model of config.json does not have.

    Dropping a bias or a norm would silently change the model.
    """
    unknown = sorted(set(names_) - set(known))
    if unknown:
        raise ConfigError(
            f"{where}: {len(unknown)} tensor(s) have no place in a {architecture.family} model with this config.json, "
            f"for example {', '.join(shown(name) for name in unknown[:3])}. The checkpoint is of another model."
        )


def checked(entry: Entry, tensor: Any, where: object) -> Any:
    """Return ``tensor`` if it holds weights: ``ConfigError`` for whole numbers and 8-bit floats, which need scales to
    mean anything, and for an embedding or output layer with values that are not finite."""
    import torch

    refuse_quantised(tensor.dtype, entry.name, where)
    if entry.rule.split == names.VOCABULARY and tensor.numel():
        least, most = torch.aminmax(tensor)
        if not (torch.isfinite(least) and torch.isfinite(most)):
            raise ConfigError(
                f"{where}: {entry.name} holds values that are not finite (NaN or infinite). Use another step."
            )
    return tensor


def refuse_quantised(dtype: Any, name: str, where: object) -> None:
    """Raise ``ConfigError`` for whole numbers and 8-bit floats."""
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ConfigError(
            f"{where}: {name} is stored as {str(dtype).removeprefix('torch.')}: quantised weights without their "
            "scales. Convert the model to bfloat16 first."
        )


def blocks_of_output_layer_or_embedding(source: TensorSource, entry: Entry) -> Sequence[Any]:
    """Return the blocks of ``entry``; for a tied output layer those of the embedding it is tied to."""
    if names.is_output_layer(entry.rule) and source.architecture.tied_embeddings:
        embedding = next(one for one in entries_of(source.architecture) if one.name.endswith(names.EMBEDDING))
        return source.blocks(embedding)
    return source.blocks(entry)


def silent(done: int, total: int, what: str) -> None:
    """Show nothing."""
