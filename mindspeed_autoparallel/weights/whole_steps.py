"""The complete steps of a checkpoint folder, and the missing shards of the others."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.spec import Plan
from mindspeed_autoparallel.weights.dist_metadata import METADATA, data_file, read_metadata
from mindspeed_autoparallel.weights.rank_files import FILE, rank_folder, step_name
from mindspeed_autoparallel.weights.rank_folders import TRACKER, iteration_folder

_STEP = re.compile(r"iter_([0-9]{7,12})")
_WRITER = re.compile(r"__([0-9]{1,7})_[0-9]{1,7}\.distcp")
_COMMON, _COMMON_KEY = "common.pt", "common_state"


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A required file of a step that is missing or too short."""

    file: str
    """Path inside the step's folder."""
    rank: int | None
    """The global rank that wrote it under the plan; ``None`` if the name does not show it."""
    holds: str
    """Description of the content that only this file holds."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One saved step."""

    folder: Path
    iteration: int | None
    """``None``: ``release``, or a folder that was given directly."""
    is_torch_dist: bool
    gaps: tuple[Gap, ...]


@dataclass(frozen=True, kw_only=True)
class SavedSteps:
    """The newest complete step, and the newer incomplete ones, newest first."""

    whole: Step | None
    broken: tuple[Step, ...]

    @property
    def newest(self) -> Step:
        """Return the step that the tracker file names."""
        return self.broken[0] if self.broken or self.whole is None else self.whole


def saved_steps(checkpoint: Path, plan: Plan) -> SavedSteps:
    """Return the complete steps of ``checkpoint``; steps newer than the tracker file's were never finished and are
    ignored.

    ``plan``: of the training that saved it. Raises ``ConfigError`` if the folder is not a checkpoint.
    """
    newest = _newest(checkpoint)
    broken: list[Step] = []
    for folder, iteration in _older(checkpoint, newest):
        step = _step(folder, iteration, plan)
        if not step.gaps:
            return SavedSteps(whole=step, broken=tuple(broken))
        broken.append(step)
    return SavedSteps(whole=None, broken=tuple(broken))


def loss_line(saved: SavedSteps, checkpoint: Path, devices_per_node: int) -> str:
    """Return a line about the missing shard with its rank and node, and the older complete step."""
    step = saved.newest
    gap = step.gaps[0]
    where = "" if gap.rank is None else f" that rank {gap.rank} on node {gap.rank // devices_per_node} wrote"
    more = f" ({len(step.gaps)} files are missing)" if len(step.gaps) > 1 else ""
    line = f"{step.folder} is incomplete: {gap.file}{where} is missing or cut off{more}; it alone holds {gap.holds}."
    if saved.whole is None:
        return f"{line} No older step of {checkpoint} is whole."
    return f"{line} Step {saved.whole.iteration} is whole."


def _newest(checkpoint: Path) -> tuple[Path, int | None]:
    try:
        folder = iteration_folder(checkpoint)
    except ConfigError:
        # The folder that the tracker names may itself be lost; then older ones decide.
        tracker = checkpoint / TRACKER
        held = tracker.read_text(encoding="utf-8").strip() if tracker.is_file() else ""
        if not re.fullmatch(r"[0-9]{1,12}", held) or not any(checkpoint.glob("iter_*")):
            raise
        folder = checkpoint / step_name(int(held))
    found = _STEP.fullmatch(folder.name)
    return folder, int(found.group(1)) if found else None


def _older(checkpoint: Path, newest: tuple[Path, int | None]) -> Iterator[tuple[Path, int | None]]:
    yield newest
    folder, iteration = newest
    if iteration is None or folder == checkpoint:
        return
    numbered = {
        int(match.group(1)): path for path in checkpoint.glob("iter_*") if (match := _STEP.fullmatch(path.name))
    }
    for number in sorted(numbered, reverse=True):
        if number < iteration:
            yield numbered[number], number


def _step(folder: Path, iteration: int | None, plan: Plan) -> Step:
    is_torch_dist = (folder / METADATA).exists() or any(folder.glob("*.distcp"))
    gaps = _gaps_of_torch_dist(folder) if is_torch_dist else _gaps_of_rank_folders(folder, plan)
    return Step(folder=folder, iteration=iteration, is_torch_dist=is_torch_dist, gaps=tuple(gaps))


def _gaps_of_torch_dist(folder: Path) -> Iterator[Gap]:
    if not (folder / METADATA).is_file():
        yield Gap(file=METADATA, rank=0, holds="the places of all tensors")
        return
    ends: dict[str, int] = {}
    names: dict[str, dict[str, None]] = {}
    metadata = read_metadata(folder)
    # Newer Megatron keeps it among the data.
    if not (folder / _COMMON).is_file() and not any(
        key.startswith(_COMMON_KEY) for key in metadata.state_dict_metadata
    ):
        yield Gap(file=_COMMON, rank=0, holds="iteration, schedules and arguments")
    for index, stored in metadata.storage_data.items():
        file = data_file(folder, stored).name
        ends[file] = max(ends.get(file, 0), stored.offset + stored.length)
        names.setdefault(file, {})[index.fqn] = None
    for file, end in sorted(ends.items()):
        path = folder / file
        if not path.is_file() or path.stat().st_size < end:
            writer = _WRITER.fullmatch(file)
            yield Gap(file=file, rank=int(writer.group(1)) if writer else None, holds=_named(list(names[file])))


def _named(names: list[str]) -> str:
    more = f" and parts of {len(names) - 1} other tensors" if len(names) > 1 else ""
    return f"parts of {names[0]}{more}"


def _gaps_of_rank_folders(folder: Path, plan: Plan) -> Iterator[Gap]:
    layout = plan.layout
    width = layout.num_devices // layout.pipeline_size
    for stage in range(layout.pipeline_size):
        for tensor in range(layout.tensor_size):
            for expert in range(layout.expert_size):
                name = rank_folder(tensor, stage, expert, layout.pipeline_size, layout.expert_size)
                if zipfile.is_zipfile(folder / name / FILE):
                    continue
                rank = stage * width + tensor + (expert * layout.tensor_size * layout.context_size)
                holds = f"weights and optimizer state of tensor rank {tensor}, pipeline rank {stage}"
                yield Gap(file=f"{name}/{FILE}", rank=rank, holds=holds)
