"""``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``: checkpoints of MindSpeed-MM and of Megatron's torch format, read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_text, shown
from mindspeed_autoparallel.weights import names, tensors
from mindspeed_autoparallel.weights.architecture import TEXT, Architecture
from mindspeed_autoparallel.weights.layouts import CheckpointLayout, ModuleLayout
from mindspeed_autoparallel.weights.placement import Entry, chunk_entries, entries_of
from mindspeed_autoparallel.weights.rank_files import Chunks, chunks_of, rank_files, step_name
from mindspeed_autoparallel.weights.source import TensorSource, checked, present_entries, refuse_unknown

TRACKER = "latest_checkpointed_iteration.txt"


def iteration_folder(checkpoint: Path) -> Path:
    """Return ``release/`` or ``iter_NNNNNNN/``, by the tracker file; ``checkpoint`` may be that folder itself."""
    tracker = checkpoint / TRACKER
    if not tracker.exists():
        if any(checkpoint.glob("mp_rank_*")) or (checkpoint / ".metadata").exists():
            return checkpoint
        raise ConfigError(f"{checkpoint} has neither {TRACKER} nor mp_rank_* folders: it is not a checkpoint.")
    held = read_text(tracker, "tracker file", max_bytes=4096).strip()
    if held != "release" and not re.fullmatch(r"[0-9]{1,12}", held):
        raise ConfigError(f"{tracker} holds {shown(held)!r}; expected 'release' or a number.")
    folder = checkpoint / step_name(None if held == "release" else int(held))
    if not folder.is_dir():
        raise ConfigError(f"{tracker} names {folder.name}, which is not there. The checkpoint is incomplete.")
    return folder


def write_tracker(checkpoint: Path, iteration: int | None) -> None:
    """Write the tracker file, which makes a checkpoint complete: it is written last."""
    text = "release" if iteration is None else str(iteration)
    (checkpoint / TRACKER).write_text(text, encoding="utf-8")


class RankFolderSource(TensorSource):
    """Canonical tensors from rank folders; the layout is inferred from the files (``self.layout``)."""

    def __init__(
        self,
        checkpoint: Path,
        architecture: Architecture,
        *,
        chunks: Callable[[Path, int], Chunks] = chunks_of,
        keeps_padding: bool = False,
        absent: tuple[str, ...] = (),
    ) -> None:
        """``chunks``: reads (file, experts of its rank). ``keeps_padding``: rows that pad the vocabulary are loaded.
        ``absent``: suffixes of names that may be missing."""
        self.architecture = architecture
        self.keeps_padding = keeps_padding
        self._chunks_of, self._absent = chunks, absent
        self.folder = iteration_folder(checkpoint)
        self._path_of = rank_files(self.folder)
        self._loaded: tuple[int, dict[tuple[int, int], Chunks]] | None = None
        self.num_stages = 1 + max(stage for _, stage, _ in self._path_of)
        self.num_files = 1 + max(rank for rank, _, _ in self._path_of)
        self.expert_size = 1 + max(expert for _, _, expert in self._path_of)
        self._refuse_absent()
        num_experts = architecture.modules[TEXT].num_experts
        if num_experts % self.expert_size:
            raise ConfigError(
                f"{self.folder} has files of {self.expert_size} expert ranks, which do not divide the {num_experts} "
                "experts of config.json. They belong to different models, or a rank folder is missing."
            )
        self._experts_per_rank = num_experts // self.expert_size
        # Canonical name -> stage, virtual, local name, expert rank.
        self._place: dict[str, tuple[int, int, str, int]] = {}
        self.layout = self._read_layout()
        present_entries(self, absent)

    def has(self, entry: Entry) -> bool:
        return entry.name in self._place

    def blocks(self, entry: Entry) -> list[Any]:
        stage, virtual, local, expert_rank = self._place[entry.name]
        whole = entry.rule.split == names.WHOLE
        num_shards = 1 if whole else self.layout.size_of(entry.rule)
        files = self._stage(stage)
        shards = []
        for shard in range(num_shards):
            # Files beyond the module's own size repeat its shards; all expert ranks repeat tensors outside experts. An
            # optimizer's state may be in the file of one data-parallel rank only.
            holding = [
                (rank, expert)
                for rank, expert in sorted(files)
                if rank % num_shards == shard
                and (not entry.rule.per_expert or expert == expert_rank)
                and (not self._absent or local in files[rank, expert][virtual])
            ]
            if not holding:
                raise ConfigError(
                    f"{self.folder}: a tensor rank has no tensor {entry.name}. Copy the whole checkpoint."
                )
            shards.append(self._shard(entry, files[holding[0]], virtual, local))
            for rank, expert in holding[1:] if whole else ():
                if not tensors.same_bits(shards[0], self._shard(entry, files[rank, expert], virtual, local)):
                    raise ConfigError(
                        f"{self.folder}: {entry.name} differs between tensor rank 0 and rank {rank} (expert rank "
                        f"{expert}), which should hold the same. Ranks have drifted apart, or the files are of "
                        "different steps."
                    )
        if len({(shard.shape, shard.dtype) for shard in shards}) > 1:
            raise ConfigError(f"{self.folder}: the parts of {entry.name} differ in shape or type between tensor ranks.")
        joined = tensors.join(entry.rule, shards)
        cut = tensors.check_shape(entry.rule, joined, self.folder)
        return [checked(entry, block, self.folder) for block in (joined if self.keeps_padding else cut)]

    def places(self) -> dict[Entry, tuple[int, int, int]]:
        """Return parameter -> virtual chunk, stage and number in its chunk, in the order of the files."""
        found: dict[Entry, tuple[int, int, int]] = {}
        for stage in range(self.num_stages):
            for (_, expert), chunks in sorted(self._stage(stage).items()):
                for virtual, state in enumerate(chunks):
                    numbers = {name: number for number, name in enumerate(state)}
                    for entry, start, holder in self._placed(self.layout, virtual, stage):
                        local = entry.local_name(start, expert * self._experts_per_rank)
                        if (not entry.rule.per_expert or holder == expert) and local in numbers:
                            found.setdefault(entry, (virtual, stage, numbers[local]))
        return found

    def any_file(self) -> Path:
        """Return the file of the first rank: all files contain the tensors that are not cut."""
        return self._path_of[min(self._path_of)]

    def _shard(self, entry: Entry, chunks: Chunks, virtual: int, local: str) -> Any:
        import torch

        shard = chunks[virtual].get(local) if virtual < len(chunks) else None
        if not isinstance(shard, torch.Tensor):
            raise ConfigError(f"{self.folder}: a tensor rank has no tensor {entry.name}. Copy the whole checkpoint.")
        return shard

    def _stage(self, stage: int) -> dict[tuple[int, int], Chunks]:
        """Return (tensor rank, expert rank) -> state dicts; only the stage that was read last stays open."""
        if self._loaded is None or self._loaded[0] != stage:
            found = {
                (rank, expert): self._chunks_of(path, self._experts_per_rank)
                for (rank, at, expert), path in self._path_of.items()
                if at == stage
            }
            self._loaded = stage, found
        return self._loaded[1]

    def _refuse_absent(self) -> None:
        """Raise ``ConfigError`` if a tensor rank or an expert rank of a stage has no file."""
        places = set(self._path_of)
        wanted = {(rank, stage) for rank in range(self.num_files) for stage in range(self.num_stages)}
        absent = sorted(wanted - {(rank, stage) for rank, stage, _ in places})
        if absent:
            raise ConfigError(
                f"{self.folder}: {len(absent)} of {len(wanted)} rank folders are missing, the first "
                f"for tensor rank {absent[0][0]}, pipeline rank {absent[0][1]}. Copy the whole checkpoint."
            )
        for stage in range(self.num_stages):
            lost = set(range(self.expert_size)) - {expert for _, at, expert in places if at == stage}
            if lost:
                raise ConfigError(
                    f"{self.folder}: no rank folder of pipeline rank {stage} holds expert rank {min(lost)}. "
                    "Copy the whole checkpoint."
                )

    def _read_layout(self) -> CheckpointLayout:
        """Count layers in the files, compare shapes between them and record the position of every tensor."""
        counts: dict[str, dict[tuple[int, int], int]] = {module: {} for module in self.architecture.modules}
        num_virtual = 1
        patterns = {
            rule.module: re.compile(re.escape(rule.target.partition("{n}")[0]) + r"([0-9]{1,5})\.")
            for rule in self.architecture.rules
            if rule.place == names.LAYER
        }
        for stage in range(self.num_stages):
            chunks = next(iter(self._stage(stage).values()))
            num_virtual = max(num_virtual, len(chunks))
            for virtual, state in enumerate(chunks):
                for module, pattern in patterns.items():
                    found = [int(match.group(1)) for match in map(pattern.match, state) if match]
                    counts[module][virtual, stage] = 1 + max(found, default=-1)
        modules = {
            module: self._module_layout(module, counts[module], num_virtual) for module in self.architecture.modules
        }
        layout = CheckpointLayout(modules=modules, expert_size=self.expert_size)
        sizes, expert_tensor_size = self._note_places(layout, num_virtual)
        sized = {module: replace(one, tensor_size=sizes.get(module, 1)) for module, one in modules.items()}
        return replace(layout, modules=sized, expert_tensor_size=expert_tensor_size)

    def _module_layout(self, module: str, counts: dict[tuple[int, int], int], num_virtual: int) -> ModuleLayout:
        shape = self.architecture.modules[module]
        rows = [[counts.get((v, s), 0) for s in range(self.num_stages)] for v in range(num_virtual)]
        replicated = module != TEXT and self.num_stages > 1 and all(count == shape.num_layers for count in rows[0])
        if replicated:
            # Counted once: the first chunk represents all.
            rows = [[0] * self.num_stages for _ in rows]
            rows[0][0] = shape.num_layers
        total = sum(count for row in rows for count in row)
        if total != shape.num_layers:
            raise ConfigError(
                f"{self.folder} holds {total} {module} layers, {rows} by stage; config.json has "
                f"{shape.num_layers}. They belong to different models, or a stage was overwritten."
            )
        return ModuleLayout(layers=tuple(map(tuple, rows)), replicated=replicated)

    def _note_places(self, layout: CheckpointLayout, num_virtual: int) -> tuple[dict[str, int], int | None]:
        """Record the position of every tensor; return the tensor size of each module and that of experts (None without
        them)."""
        sizes: dict[str, int] = {}
        expert_tensor_size: int | None = None
        output_layers = [entry.name for entry in entries_of(self.architecture) if names.is_output_layer(entry.rule)]
        for stage in range(self.num_stages):
            files = self._stage(stage)
            by_expert = {expert: files[rank, expert] for rank, expert in sorted(files, reverse=True)}
            for virtual in range(num_virtual):
                for entry, start, expert in self._placed(layout, virtual, stage):
                    chunks = by_expert[expert]
                    state = chunks[virtual] if virtual < len(chunks) else {}
                    local = entry.local_name(start, expert * self._experts_per_rank)
                    if local not in state:
                        continue
                    self._place.setdefault(entry.name, (stage, virtual, local, expert))
                    size = self._tensor_size(entry, state[local])
                    if size and entry.rule.per_expert:
                        expert_tensor_size = expert_tensor_size or size
                    elif size:
                        sizes.setdefault(entry.rule.module, size)
                for expert, chunks in by_expert.items():
                    first = expert * self._experts_per_rank
                    known = {
                        entry.local_name(start, first)
                        for entry, start, holder in self._placed(layout, virtual, stage)
                        if holder == expert or not entry.rule.per_expert
                    }
                    held = chunks[virtual] if virtual < len(chunks) else {}
                    weights = (name for name in held if not _is_no_weight(name))
                    refuse_unknown(weights, {*known, *output_layers}, self.architecture, self.folder)
                state = by_expert[0][virtual] if virtual < len(by_expert[0]) else {}
                for output in output_layers:
                    if output in state:
                        # Also if config.json ties it to an embedding in the same chunk: they may differ.
                        self._place.setdefault(output, (stage, virtual, output, 0))
        return sizes, expert_tensor_size

    def _placed(self, layout: CheckpointLayout, virtual: int, stage: int) -> Iterator[tuple[Entry, int, int]]:
        """Yield (entry, first layer of its chunk, expert rank) of the tensors that a chunk should hold."""
        for entry, start in chunk_entries(self.architecture, layout, virtual, stage):
            yield entry, start, entry.expert // self._experts_per_rank if entry.rule.per_expert else 0

    def _tensor_size(self, entry: Entry, shard: Any) -> int:
        """Return the whole width of a layer's second product over the width of ``shard``; 0 for all other tensors."""
        if entry.rule.split != names.COLUMNS or entry.rule.place != names.LAYER:
            return 0
        module, width = entry.rule.module, tensors.canonical_shape(entry.rule)[1]
        if len(getattr(shard, "shape", ())) != 2 or not shard.shape[1]:
            raise ConfigError(f"{self.folder}: {entry.name} of the {module} module is not a matrix.")
        if width % shard.shape[1]:
            raise ConfigError(
                f"{self.folder}: {entry.name} of the {module} module has {shard.shape[1]} columns, which do "
                f"not divide the {width} of config.json. They belong to different models."
            )
        return int(width // shard.shape[1])


def _is_no_weight(name: str) -> bool:
    return name.endswith(("_extra_state", "inv_freq")) or "rotary_pos_emb" in name
