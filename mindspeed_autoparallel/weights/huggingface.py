"""Hugging Face folders: safetensors shards with an index, read and written one shard at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json, shown
from mindspeed_autoparallel.weights import names, tensors
from mindspeed_autoparallel.weights.architecture import MEGATRON, TEXT, read_architecture
from mindspeed_autoparallel.weights.dcp import DcpFile
from mindspeed_autoparallel.weights.placement import Entry
from mindspeed_autoparallel.weights.safetensors_file import SafetensorsFile
from mindspeed_autoparallel.weights.shard_writer import INDEX
from mindspeed_autoparallel.weights.source import TensorSource, checked, present_entries, refuse_quantised

_LONGEST_NAME_BYTES = 255
"""Most bytes of a file name that every file system accepts."""


class HuggingFaceSource(TensorSource):
    """Canonical tensors from the safetensors of ``folder``, read on access."""

    def __init__(self, folder: Path, host: str = MEGATRON, checkpoint: Path | None = None) -> None:
        """``checkpoint``: of an FSDP2 training of the model that ``folder`` describes, to read the tensors from."""
        self.folder = checkpoint or folder
        self._dcp = None if checkpoint is None else DcpFile(checkpoint)
        self.architecture = read_architecture(folder, host, None if self._dcp is None else self._dcp.shapes())
        if self._dcp is not None:
            self._dcp.num_experts = self.architecture.modules[TEXT].num_experts
        self.file_of = shard_of_tensor(folder) if self._dcp is None else dict.fromkeys(self._dcp.keys(), self._dcp.path)
        self.original_of = {names.classic_name(name): name for name in self.file_of}
        self._open: dict[Path, SafetensorsFile | DcpFile] = {} if self._dcp is None else {self._dcp.path: self._dcp}
        self._refuse_unknown()
        self._check_shapes()
        self._check_tie()
        self._check_copies()

    def has(self, entry: Entry) -> bool:
        return all(stored_name(source) in self.original_of for source in entry.sources)

    def blocks(self, entry: Entry) -> list[Any]:
        parts = [checked(entry, self._read(source), self.folder) for source in entry.sources]
        return tensors.combine(
            entry.rule,
            [
                part[entry.expert] if is_stack(source) else part
                for part, source in zip(parts, entry.sources, strict=True)
            ],
        )

    def _read(self, source: str) -> Any:
        name = self.original_of[stored_name(source)]
        return self._file(name).read(name)

    def _file(self, name: str) -> SafetensorsFile | DcpFile:
        path = self.file_of[name]
        if path not in self._open:
            self._open[path] = SafetensorsFile(path)
        return self._open[path]

    def _check_shapes(self) -> None:
        """Raise ``ConfigError`` for the first tensor whose shape contradicts config.json; reads headers only."""
        num_experts = self.architecture.modules[TEXT].num_experts
        for entry in present_entries(self):
            for shape, source in zip(entry.rule.shapes, entry.sources, strict=True):
                name = self.original_of[stored_name(source)]
                stored = self._file(name).shape(name)
                wanted = (num_experts, *shape) if is_stack(source) else shape
                refuse_quantised(self._file(name).dtype(name), name, self.folder)
                if stored != wanted:
                    raise ConfigError(
                        f"{self.folder}: {name} has the shape {list(stored)}; config.json implies {list(wanted)}. "
                        "The weights and config.json belong to different models."
                    )

    def _check_tie(self) -> None:
        """Raise ``ConfigError`` if config.json ties the output layer to a different embedding."""
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if not self.architecture.tied_embeddings or not {head, embedding} <= set(self.original_of):
            return
        if not tensors.same_bits(self._read(head), self._read(embedding)):
            raise ConfigError(
                f"{self.folder}: config.json sets tie_word_embeddings, but lm_head.weight differs from the embedding. "
                'Set "tie_word_embeddings": false there to keep it (and --untie-embeddings-and-output-weights in '
                "training), or remove lm_head.weight from the file to drop it."
            )

    def _check_copies(self) -> None:
        """Raise ``ConfigError`` if a repeated tensor in these files has another value."""
        for copy, original in self.architecture.copies:
            if original in self.original_of and not tensors.same_bits(self._read(copy), self._read(original)):
                raise ConfigError(
                    f"{self.folder}: {self.original_of[copy]} differs from {self.original_of[original]}, which "
                    "training shares with it. Remove the copy to drop it."
                )

    def _refuse_unknown(self) -> None:
        known = {stored_name(source) for entry in present_entries(self) for source in entry.sources}
        known |= {copy for copy, _ in self.architecture.copies}
        left_over = sorted(
            name
            for classic, name in self.original_of.items()
            if classic not in known
            and not classic.startswith(self.architecture.left_out)
            and not name.endswith(names.IGNORED_SOURCES)
            and not (self.architecture.tied_embeddings and classic == "lm_head.weight")
        )
        if left_over:
            raise ConfigError(
                f"{self.folder}: {len(left_over)} tensor(s) have no place in a {self.architecture.family} model, "
                f"for example {', '.join(left_over[:3])}. Merge adapters first, or check that config.json fits."
            )


def shard_of_tensor(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor, from the index or from the only file; ``ConfigError`` names a missing shard."""
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX, "index of shards")
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{folder / INDEX} has no 'weight_map'. Download it again.")
        odd = [file for file in weight_map.values() if not _is_file_name(file)]
        if odd:
            raise ConfigError(f"{folder / INDEX} names a shard {shown(odd[0])}, which is not a plain file name.")
        absent = sorted({file for file in weight_map.values() if not (folder / file).exists()})
        if absent:
            raise ConfigError(
                f"{folder}: {len(absent)} of {len(set(weight_map.values()))} shards are missing: "
                f"{', '.join(absent[:3])}. Download them again."
            )
        listed = {name: folder / file for name, file in weight_map.items()}
        for path in sorted(set(listed.values())):
            lost = {name for name, file in listed.items() if file == path} - set(SafetensorsFile(path).keys())
            if lost:
                raise ConfigError(f"shard {path} lacks {min(lost)}, which the index lists. Download it again.")
        _refuse_two_values(folder, sorted(set(listed.values())))
        return listed
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        hint = " Its .bin files are pickles: save the model as safetensors." if any(folder.glob("*.bin")) else ""
        raise ConfigError(f"{folder} has no safetensors.{hint}")
    _refuse_two_values(folder, files)
    return {name: path for path in files for name in SafetensorsFile(path).keys()}  # noqa: SIM118 - not a dict


def _refuse_two_values(folder: Path, files: Iterable[Path]) -> None:
    """Raise ``ConfigError`` if two of ``files`` hold tensors of one name with different values."""
    found: dict[str, SafetensorsFile] = {}
    for file in map(SafetensorsFile, files):
        for name in file.keys():  # noqa: SIM118 - not a dict
            if name in found and not tensors.same_bits(found[name].read(name), file.read(name)):
                raise ConfigError(
                    f"{folder}: {found[name].path.name} and {file.path.name} both hold {name}, with different values. "
                    "Keep the file that counts."
                )
            found[name] = file


def is_stack(source: str) -> bool:
    """Return whether ``source`` is one expert's part of a tensor that holds all of them."""
    return source.endswith("[e]")


def stored_name(source: str) -> str:
    return source.removesuffix("[e]")


def _is_file_name(name: Any) -> bool:
    plain = isinstance(name, str) and re.fullmatch(r"[^/\\\0]+", name) is not None and name not in (".", "..")
    return plain and len(name.encode("utf-8", "replace")) <= _LONGEST_NAME_BYTES
