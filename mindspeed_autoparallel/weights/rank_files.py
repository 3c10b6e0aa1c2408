"""The files of rank folders: the rank of each, and the state dicts in one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.weights import memory, names, tensors
from mindspeed_autoparallel.weights.pickles import load_tensors_only
from mindspeed_autoparallel.weights.spelling import canonical_names, grouped_name
from mindspeed_autoparallel.weights.torch_file import TorchFile

if TYPE_CHECKING:
    import torch

FILE = "model_optim_rng.pt"
_RANK_FOLDER = re.compile(r"mp_rank_([0-9]{1,5})(?:_([0-9]{3}))?(?:_([0-9]{3}))?$")
CHECKPOINT_VERSION = 3.0
Chunks = list[dict[str, object]]
"""State dict of every virtual chunk in a file, under canonical local names."""


def step_name(iteration: int | None) -> str:
    """Return the name of a step's folder; None: weights without a step."""
    return "release" if iteration is None else f"iter_{iteration:07d}"


def iteration_of(folder: Path) -> int | None:
    """Invert ``step_name``."""
    number = folder.name.removeprefix("iter_")
    return int(number) if number.isdigit() else None


class RankFile:
    """One rank's file during writing. ``states``: key (``model``, ``model0``, ...) -> name -> placeholder of the
    tensor. ``shapes``: the same by canonical name."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True)
        self.path = path
        self._stream = path.open("wb")
        self.file = TorchFile(self._stream)
        self.shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        self._waiting: dict[str, torch.Tensor] = {}
        self.states: dict[str, dict[str, object]] = {}

    def add(self, key: str, name: str, blocks: Sequence[Any]) -> None:
        self.states[key][name] = self.file.add(blocks, tensors.shape_of(blocks))

    def add_grouped(self, key: str, local: str, blocks: Sequence[Any], per_rank: int) -> bool:
        """Put an expert's weight into the tensor of all experts of a rank; False for any other weight."""
        grouped = grouped_name(local)
        if grouped is None:
            return False
        name, index = grouped
        num_rows, num_columns = tensors.shape_of(blocks)
        if name not in self._waiting:
            self._waiting[name] = memory.empty((per_rank, num_columns, num_rows), blocks[0].dtype)
        begin = 0
        for block in blocks:
            self._waiting[name][index][:, begin : begin + len(block)].copy_(block.t())
            begin += len(block)
        if index == per_rank - 1:
            # The shape is Megatron's; the memory is that of [expert, in, out].
            stack = self._waiting.pop(name)
            flat = stack.view(stack.shape[1], -1) if name.endswith("1") else stack.view(-1, stack.shape[2])
            self.add(key, name, [flat])
        return True

    def finish(self, iteration: int | None, state: dict[str, object]) -> None:
        self.file.finish(
            {"checkpoint_version": CHECKPOINT_VERSION, "iteration": iteration or 0, **state, **self.states}
        )
        self._stream.close()


def rank_folder(tensor: int, stage: int, expert: int, num_stages: int, expert_size: int) -> str:
    """Return the name of a rank's folder, which has numbers of stage and expert if there are several."""
    name = f"mp_rank_{tensor:02d}" + (f"_{stage:03d}" if num_stages > 1 else "")
    return name + (f"_{expert:03d}" if expert_size > 1 else "")


def rank_files(folder: Path) -> dict[tuple[int, int, int], Path]:
    """Return (tensor rank, pipeline rank, expert rank) -> file."""
    found = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = _RANK_FOLDER.match(path.name)
        if match is None:
            continue
        if not (path / FILE).exists():
            raise ConfigError(f"{path} has no {FILE}. The checkpoint is incomplete.")
        found[int(match.group(1)), int(match.group(2) or 0), int(match.group(3) or 0)] = path / FILE
    if not found:
        raise ConfigError(f"{folder} has no mp_rank_* folders with {FILE}.")
    if _is_expert_numbered(found):
        return {(rank, 0, number): path for (rank, number, _), path in found.items()}
    return found


def _is_expert_numbered(found: dict[tuple[int, int, int], Path]) -> bool:
    """Return whether ``mp_rank_TT_NNN`` means expert NNN of a single pipeline stage: then every folder has the
    embedding and the norm after the last layer (the last of several stages may have both, for multi-token
    prediction)."""
    some = {number: path for (_, number, _), path in sorted(found.items(), reverse=True)}
    if any(expert for _, _, expert in found) or not {0, 1} <= set(some):
        return False
    wanted = (names.EMBEDDING, "decoder.final_layernorm.weight")
    held = ([name for chunk in chunks_of(some[number], 0) for name in chunk] for number in (0, 1))
    return all(any(name.endswith(end) for name in one) for one in held for end in wanted)


def chunks_of(path: Path, experts_per_rank: int) -> Chunks:
    """Return the state dicts of the virtual chunks in a file, under canonical local names."""
    content = load_tensors_only(path)
    return [canonical_names(content[key], experts_per_rank) for key in chunk_keys(content, path)]


def chunk_keys(content: Any, path: Path) -> list[str]:
    """Return the keys of the virtual chunks' state dicts in the content of ``path``, checked, in their order."""
    named = [key for key in content if isinstance(key, str)] if isinstance(content, dict) else []
    numbered = sorted((key for key in named if re.fullmatch(r"model[0-9]{1,5}", key)), key=_number)
    keys = ["model"] if "model" in named else numbered
    if not keys:
        raise ConfigError(f"{path} has neither 'model' nor 'model0': it holds no weights.")
    for key in keys:
        if not isinstance(content[key], dict) or not all(isinstance(name, str) for name in content[key]):
            raise ConfigError(f"{path}: {key!r} is not a table of tensors by name. The file is damaged.")
    return keys


def _number(key: str) -> int:
    return int(key.removeprefix("model"))
