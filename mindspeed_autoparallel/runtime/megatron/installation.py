"""Finds the Megatron on the path, and checks that the features can run on it before it is imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError, told_in_a_line
from mindspeed_autoparallel.patching.releases import release_in, within
from mindspeed_autoparallel.runtime.first_rank import print_once
from mindspeed_autoparallel.runtime.flags.switches import HETERO, SWITCHES

SUPPORTED = ">=0.12,<0.21"
"""Releases of megatron-core whose sources were run with the features (docs/hosts.md)."""
_WORDS = "megatron-core 0.12 to 0.20"
_PARTS = (
    *("core/parallel_state", "core/pipeline_parallel/schedules", "core/transformer/transformer_config"),
    *("training/arguments", "training/checkpointing", "training/global_vars"),
    *("training/initialize", "training/training"),
)
"""Modules that every supported release has and that the features work through."""


@dataclass(frozen=True)
class Installation:
    """The packages ``megatron.core`` and ``megatron.training`` that an import would find."""

    core: Path | None
    """Folder of ``megatron.core``."""
    training: Path | None
    """Folder of ``megatron.training``."""
    hidden: tuple[Path, ...] = ()
    """Other folders of ``megatron.core`` further back on the path."""

    @property
    def release(self) -> str:
        """Return the release, such as ``0.19.2``; empty if unknown."""
        return release_in(self.core) if self.core is not None else ""


def find_installation(path: Iterable[str] | None = None) -> Installation:
    """Search ``path`` (``sys.path``) in the order of an import, without importing.

    ``megatron`` is a namespace package: each part comes from the first folder that has it, unless a ``megatron`` with
    an ``__init__.py`` is on the path, which then provides all parts.
    """
    folders = [Path(entry or ".") / "megatron" for entry in (sys.path if path is None else path)]
    folders = [folder for folder in folders if folder.is_dir()]
    whole = next((folder for folder in folders if (folder / "__init__.py").is_file()), None)
    if whole is not None:
        folders = [whole]
    cores = _with_init(folders, "core")
    trainings = _with_init(folders, "training")
    distinct = list({folder.resolve(): folder for folder in reversed(cores)}.values())[::-1]
    return Installation(cores[0] if cores else None, trainings[0] if trainings else None, tuple(distinct[1:]))


def check_installation(installation: Installation, flags: Sequence[str]) -> str:
    """Raise ``ConfigError`` if ``flags`` of this package cannot work on it; else return a remark or an empty string."""
    core, training, release = installation.core, installation.training, installation.release
    given = ", ".join(sorted(flags))
    if core is None:
        return ""  # the script's own import fails as well, or finds Megatron in another way
    if release and not within(release, SUPPORTED):
        raise ConfigError(
            f"{given} needs {_WORDS}; {core.parent.parent} has {release}. Put a supported release first on PYTHONPATH, "
            "or remove the flag: Megatron then runs unchanged."
        )
    if training is None:
        raise ConfigError(
            f"{given} needs megatron.training, which is not installed: megatron.core {release} in "
            f"{core.parent.parent} comes without it. Put a source checkout of Megatron-LM {release} on PYTHONPATH, or "
            "install megatron-core 0.17 or newer, whose wheel has both."
        )
    if training.parent.resolve() != core.parent.resolve():
        raise ConfigError(
            f"two Megatrons on one path: megatron.core {release} comes from {core.parent.parent}, megatron.training "
            f"from {training.parent.parent}. Put one complete checkout first on PYTHONPATH."
        )
    if missing := _missing_parts(core.parent):
        raise ConfigError(
            f"megatron-core {release} in {core.parent.parent} is incomplete: megatron/{missing[0]} is missing. An "
            "interrupted checkout or installation is the usual cause: get it again (git restore ., or pip install)."
        )
    if installation.hidden:
        others = ", ".join(f"{release_in(folder)} in {folder.parent.parent}" for folder in installation.hidden)
        return f"using megatron-core {release} in {core.parent.parent}; also on the path, and not used: {others}"
    return ""


def _ours(flags: Collection[str]) -> list[str]:
    """Return the switches of this package among ``flags``: MindSpeed-MM has its own ``--hetero-parallel``."""
    of_host = {HETERO} if importlib.util.find_spec("mindspeed_mm") is not None else set()
    return sorted({switch.flag for switch in SWITCHES if switch.flag in flags} - of_host)


def refuse_unfit_installation(flags: Collection[str]) -> None:
    """End the process with one line if switches among ``flags`` cannot work on the Megatron about to be imported."""
    switches = _ours(flags)
    if not switches:
        return
    with told_in_a_line():
        remark = check_installation(find_installation(), switches)
    if remark:
        print_once(f"mindspeed_autoparallel: {remark}", to_stderr=True)


def refuse_late_import(flags: Collection[str], modules: Sequence[str]) -> None:
    """End the process with one line if switches among ``flags`` need ``modules`` imported before this package."""
    switches = _ours(flags)
    if switches and modules:
        with told_in_a_line():
            raise ConfigError(
                f"{', '.join(switches)} needs mindspeed_autoparallel to be imported before megatron, but "
                f"{', '.join(sorted(set(modules)))} was imported first. Move `import mindspeed_autoparallel` above the "
                f"first megatron (or mindspeed) import of {Path(sys.argv[0]).name}."
            )


def _missing_parts(megatron: Path) -> list[str]:
    """Return the ``_PARTS`` missing in the folder ``megatron`` in every form: source, compiled or a package."""
    return [part for part in _PARTS if not any((megatron / part).parent.glob(f"{Path(part).name}*"))]


def _with_init(folders: Iterable[Path], name: str) -> list[Path]:
    return [folder / name for folder in folders if (folder / name / "__init__.py").is_file()]
