"""``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``: checkpoints of MindSpeed-MM and of Megatron's torch format."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_text, shown
from mindspeed_autoparallel.weights import names, tensors
from mindspeed_autoparallel.weights.architecture import TEXT, Architecture
from mindspeed_autoparallel.weights.layouts import CheckpointLayout, ModuleLayout
from mindspeed_autoparallel.weights.pickles import load_tensors_only
from mindspeed_autoparallel.weights.placement import Entry, chunk_entries, entries_of
from mindspeed_autoparallel.weights.progress import Progress, silent
from mindspeed_autoparallel.weights.source import TensorSource, load_output_layer_or_embedding, present_entries

TRACKER = "latest_checkpointed_iteration.txt"
FILE = "model_optim_rng.pt"
CHECKPOINT_VERSION = 3.0
_RANK_FOLDER = re.compile(r"mp_rank_([0-9]{1,5})(?:_([0-9]{3}))?(?:_([0-9]{3}))?$")
# Transformer Engine keeps a norm inside the linear layer after it.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_bias": "pre_mlp_layernorm.bias",
}


def iteration_folder(checkpoint: Path) -> Path:
    """Return ``release/`` or ``iter_NNNNNNN/``, as the tracker file says; ``checkpoint`` may be that folder itself."""
    tracker = checkpoint / TRACKER
    if not tracker.exists():
        if any(checkpoint.glob("mp_rank_*")) or (checkpoint / ".metadata").exists():
            return checkpoint
        raise ConfigError(f"{checkpoint} has neither {TRACKER} nor mp_rank_* folders: it is not a checkpoint.")
    said = read_text(tracker, "tracker file", max_bytes=4096).strip()
    if said != "release" and not re.fullmatch(r"[0-9]{1,12}", said):
        raise ConfigError(f"{tracker} says {shown(said)!r}; it should say 'release' or a number.")
    folder = checkpoint / (said if said == "release" else f"iter_{int(said):07d}")
    if not folder.is_dir():
        raise ConfigError(f"{tracker} names {folder.name}, which is not there. The checkpoint is incomplete.")
    return folder


class RankFolderSource:
    """Canonical tensors out of rank folders; the layout is read off the files (``self.layout``)."""

    def __init__(self, checkpoint: Path, architecture: Architecture) -> None:
        self.architecture = architecture
        self.folder = iteration_folder(checkpoint)
        self._path_of = _rank_files(self.folder)
        self._loaded: tuple[int, list[list[dict[str, Any]]]] | None = None
        num_stages = 1 + max(stage for _, stage in self._path_of)
        self.num_files = 1 + max(rank for rank, _ in self._path_of)
        absent = [(r, s) for r in range(self.num_files) for s in range(num_stages) if (r, s) not in self._path_of]
        if absent:
            raise ConfigError(
                f"{self.folder}: {len(absent)} of {self.num_files * num_stages} rank folders are missing, the first "
                f"for tensor rank {absent[0][0]}, pipeline rank {absent[0][1]}. Copy the whole checkpoint."
            )
        self._place: dict[str, tuple[int, int, str]] = {}  # canonical name -> (stage, virtual, local name)
        self.layout = self._read_layout(num_stages)
        present_entries(self)

    def has(self, entry: Entry) -> bool:
        return entry.name in self._place

    def load(self, entry: Entry) -> Any:
        stage, virtual, local = self._place[entry.name]
        num_shards = self.layout.modules[entry.rule.module].tensor_size
        # Files beyond the module's own size repeat its shards.
        shards = [self._shard(entry, chunks, virtual, local) for chunks in self._stage(stage)[:num_shards]]
        if len({(shard.shape, shard.dtype) for shard in shards}) > 1:
            raise ConfigError(f"{self.folder}: the parts of {entry.name} differ in shape or type between tensor ranks.")
        return tensors.check_shape(entry.rule, tensors.join(entry.rule, shards), self.architecture, self.folder)

    def _shard(self, entry: Entry, chunks: list[dict[str, Any]], virtual: int, local: str) -> Any:
        import torch

        shard = chunks[virtual].get(local) if virtual < len(chunks) else None
        if not isinstance(shard, torch.Tensor):
            raise ConfigError(f"{self.folder}: a tensor rank has no tensor {entry.name}. Copy the whole checkpoint.")
        return shard

    def _stage(self, stage: int) -> list[list[dict[str, Any]]]:
        """Return [tensor rank][virtual chunk] -> state dict; only the stage last asked for stays open."""
        if self._loaded is None or self._loaded[0] != stage:
            self._loaded = (stage, [_chunks(self._path_of[rank, stage]) for rank in range(self.num_files)])
        return self._loaded[1]

    def _read_layout(self, num_stages: int) -> CheckpointLayout:
        """Count layers in the files, compares shapes between them and notes where every tensor is."""
        counts: dict[str, dict[tuple[int, int], int]] = {module: {} for module in self.architecture.modules}
        sizes = dict.fromkeys(self.architecture.modules, 1)
        num_virtual = 1
        patterns = {
            module: re.compile(re.escape(prefix) + r"([0-9]{1,5})\.")
            for module, prefix in _layer_prefixes(self.architecture)
        }
        for stage in range(num_stages):
            # Shapes decide the tensor size, so the first rank's file is enough.
            chunks = _chunks(self._path_of[0, stage])
            num_virtual = max(num_virtual, len(chunks))
            for virtual, state in enumerate(chunks):
                for module, pattern in patterns.items():
                    found = [int(match.group(1)) for match in map(pattern.match, state) if match]
                    counts[module][virtual, stage] = 1 + max(found, default=-1)
                    sizes[module] = max(sizes[module], self._tensor_size(module, state))
        modules = {}
        for module, shape in self.architecture.modules.items():
            rows = [[counts[module].get((v, s), 0) for s in range(num_stages)] for v in range(num_virtual)]
            replicated = module != TEXT and num_stages > 1 and all(count == shape.num_layers for count in rows[0])
            if replicated:
                # Counted once: the first chunk stands for all.
                rows = [[0] * num_stages for _ in rows]
                rows[0][0] = shape.num_layers
            total = sum(count for row in rows for count in row)
            if total != shape.num_layers:
                raise ConfigError(
                    f"{self.folder} holds {total} {module} layers, {rows} by stage; config.json says "
                    f"{shape.num_layers}. They belong to different models, or a stage was overwritten."
                )
            modules[module] = ModuleLayout(
                layers=tuple(map(tuple, rows)), tensor_size=sizes[module], replicated=replicated
            )
        layout = CheckpointLayout(modules=modules)
        output_layers = [entry.name for entry in entries_of(self.architecture) if names.is_output_layer(entry.rule)]
        for stage in range(num_stages):
            chunks = _chunks(self._path_of[0, stage])
            for virtual, state in enumerate(chunks):
                for entry, local in chunk_entries(self.architecture, layout, virtual, stage):
                    if local in state:
                        self._place.setdefault(entry.name, (stage, virtual, local))
                for output in output_layers:
                    if output in state:
                        # Also where config.json ties it to an embedding in the same chunk: they may differ.
                        self._place.setdefault(output, (stage, virtual, output))
        return layout

    def _tensor_size(self, module: str, state: dict[str, Any]) -> int:
        """Return the whole width of an attention projection over the width of its shard in ``state``; 1 if there is
        none."""
        shape = self.architecture.modules[module]
        prefix = dict(_layer_prefixes(self.architecture))[module]
        shard = state.get(f"{prefix}0.self_attention.linear_proj.weight")
        if shard is None:
            return 1
        width = shape.num_heads * shape.head_size
        if len(getattr(shard, "shape", ())) != 2 or not shard.shape[1]:
            raise ConfigError(f"{self.folder}: the attention projections of the {module} module are no matrices.")
        if width % shard.shape[1]:
            raise ConfigError(
                f"{self.folder}: attention projections of the {module} module have {shard.shape[1]} columns, which is "
                f"no part of the {width} that config.json says. They belong to different models."
            )
        return int(width // shard.shape[1])


def write_rank_folders(
    source: TensorSource,
    folder: Path,
    layout: CheckpointLayout,
    *,
    iteration: int | None = None,
    progress: Progress = silent,
) -> None:
    """Write ``source`` into the empty ``folder`` under ``layout``; ``iteration`` None makes a ``release`` checkpoint.

    Holds one pipeline stage (all its tensor ranks) in memory. The tracker file is written last.
    """
    import torch

    architecture = source.architecture
    name = "release" if iteration is None else f"iter_{iteration:07d}"
    num_files = layout.tensor_size
    present = {entry.name for entry in present_entries(source)}
    done, total = 0, len(present)
    for stage in range(layout.pipeline_size):
        states: list[dict[str, Any]] = [{"checkpoint_version": CHECKPOINT_VERSION} for _ in range(num_files)]
        for state in states:
            state["iteration"] = iteration or 0
        for virtual in range(layout.virtual_size):
            key = "model" if layout.virtual_size == 1 else f"model{virtual}"
            for state in states:
                state[key] = {}
            for entry, local in chunk_entries(architecture, layout, virtual, stage):
                tied = names.is_output_layer(entry.rule) and architecture.tied_embeddings
                if entry.name not in present and not tied:
                    continue
                tensor = load_output_layer_or_embedding(source, entry)
                size = layout.modules[entry.rule.module].tensor_size
                shards = tensors.cut(entry.rule, tensor, size, layout.padded_vocab(architecture.vocab_size))
                for rank, state in enumerate(states):
                    state[key][local] = shards[rank % size]
                del tensor, shards
                done += 1
                progress(min(done, total), total, f"{name} stage {stage}")
        for rank, state in enumerate(states):
            for expert in range(layout.expert_size):
                path = folder / name / _folder_name(rank, stage, expert, layout) / FILE
                path.parent.mkdir(parents=True)
                torch.save(state, path)
            state.clear()
    (folder / TRACKER).write_text("release" if iteration is None else str(iteration), encoding="utf-8")


def _folder_name(rank: int, stage: int, expert: int, layout: CheckpointLayout) -> str:
    name = f"mp_rank_{rank:02d}"
    if layout.pipeline_size > 1:
        name += f"_{stage:03d}"
    return name + (f"_{expert:03d}" if layout.expert_size > 1 else "")


def _rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """Return (tensor rank, pipeline rank) -> file. Dense models repeat themselves over expert ranks: the first one
    counts."""
    found = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = _RANK_FOLDER.match(path.name)
        if match is None or int(match.group(3) or 0):
            continue
        if not (path / FILE).exists():
            raise ConfigError(f"{path} has no {FILE}. The checkpoint is incomplete.")
        found[int(match.group(1)), int(match.group(2) or 0)] = path / FILE
    if not found:
        raise ConfigError(f"{folder} has no mp_rank_* folders with {FILE}.")
    if _is_expert_numbered(found):
        return {place: path for place, path in found.items() if place[1] == 0}
    return found


def _is_expert_numbered(found: dict[tuple[int, int], Path]) -> bool:
    """Return whether ``mp_rank_TT_NNN`` means expert NNN where there is one pipeline stage: then every folder has the
    embedding."""
    if (0, 1) not in found:
        return False
    both = (_chunks(found[0, number]) for number in (0, 1))
    return all(any(name.endswith(names.EMBEDDING) for chunk in chunks for name in chunk) for chunks in both)


def _chunks(path: Path) -> list[dict[str, Any]]:
    """Return the state dicts of the virtual chunks in a file, norms under their own names."""
    content = load_tensors_only(path)
    named = [key for key in content if isinstance(key, str)] if isinstance(content, dict) else []
    numbered = sorted((key for key in named if re.fullmatch(r"model[0-9]{1,5}", key)), key=_number)
    keys = ["model"] if "model" in named else numbered
    if not keys:
        raise ConfigError(f"{path} has neither 'model' nor 'model0': it holds no weights.")
    for key in keys:
        if not isinstance(content[key], dict) or not all(isinstance(name, str) for name in content[key]):
            raise ConfigError(f"{path}: {key!r} is no table of tensors by name. The file is damaged.")
    return [{_unfused(name): tensor for name, tensor in content[key].items()} for key in keys]


def _number(key: str) -> int:
    return int(key.removeprefix("model"))


def _unfused(name: str) -> str:
    for fused, plain in _FUSED_NORMS.items():
        if name.endswith(fused):
            return name.removesuffix(fused) + plain
    return name


def _layer_prefixes(architecture: Architecture) -> list[tuple[str, str]]:
    """Return (module, what stands before the layer number in its names)."""
    prefixes = {}
    for entry in entries_of(architecture):
        if entry.rule.place == names.LAYER:
            prefixes[entry.rule.module] = entry.rule.target.partition("{n}")[0]
    return list(prefixes.items())
