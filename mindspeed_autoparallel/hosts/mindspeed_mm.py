"""Read the YAML of MindSpeed-MM's native FSDP2 trainer (``mindspeed_mm/fsdp/train/trainer.py``), with its defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_text
from mindspeed_autoparallel.hosts.reading import Values
from mindspeed_autoparallel.hosts.yaml_edit import Value, load_tree, with_values

SECTIONS = ("parallel", "model", "data", "training")
"""Sections without which the trainer does not start; ``features`` and ``tools`` have defaults."""


@dataclass(frozen=True, kw_only=True)
class NativeSizes:
    """Sizes as in the file: ``None`` if the trainer computes them from the world size."""

    fully_shard: int | None = None
    tensor: int = 1
    ring: int = 1
    ulysses: int = 1
    expert: int = 1
    expert_fully_shard: int | None = None
    data: int | None = None
    micro_batch: int = 1
    accumulation: int = 1


@dataclass(frozen=True, kw_only=True)
class NativeSharding:
    """``parallel.fsdp_plan`` and ``parallel.ep_plan``."""

    apply_modules: tuple[str, ...] = ()
    ignored_modules: tuple[str, ...] = ()
    hook_modules: tuple[str, ...] = ()
    param_dtype: str = ""
    reduce_dtype: str = ""
    reshard_after_forward: bool = True
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    cpu_offload: bool = False
    expert_modules: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NativeFeatures:
    """The switches of ``features``; a list of modules is empty if its switch is off."""

    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    chunk_batch: tuple[str, ...] = ()
    chunk_batch_size: int = 0
    """Samples per chunk; 0: off."""
    chunk_loss_module: str = ""
    chunk_loss_size: int = 0
    """Tokens per chunk; 0: off."""
    keep_attention: bool = False
    """``model.skip_flash_attn_recompute``: whether recomputed layers keep the outputs of attention."""


@dataclass(frozen=True, kw_only=True)
class NativeConfig:
    """The part of a configuration that a plan reads or decides, and its text."""

    path: Path
    text: str
    values: Values
    sizes: NativeSizes
    sharding: NativeSharding
    features: NativeFeatures
    model_id: str
    model_path: str
    frozen: tuple[str, ...]
    meta_init: bool

    def with_values(self, values: Mapping[str, Value]) -> str:
        """Return the text of the file with these dotted keys set and everything else kept."""
        return with_values(self.text, values, str(self.path))


def is_native(text: str) -> bool:
    """Return whether ``text`` looks like a file of this trainer, without parsing it."""
    return "fully_shard_parallel_size" in text or ("fsdp_plan:" in text and "parallel:" in text)


def read_native(path: Path) -> NativeConfig:
    """Read a file; raises ``ConfigError`` for a missing section, a value of another type and a size below 1."""
    text = read_text(path, "the configuration")
    tree = load_tree(text, str(path))
    missing = [name for name in SECTIONS if not isinstance(tree.get(name), Mapping)]
    if missing:
        here = ", ".join(map(str, tree)) or "none"
        raise ConfigError(f"{path} has no section {missing[0]!r} (its sections: {here}); the trainer needs it.")
    values = Values(tree, str(path))
    return NativeConfig(
        path=path,
        text=text,
        values=values,
        sizes=_sizes(values),
        sharding=_sharding(values),
        features=_features(values),
        model_id=values.text("model.model_id"),
        model_path=values.text("model.model_name_or_path"),
        frozen=(*values.texts("model.freeze"), *_frozen_parts(values)),
        meta_init=values.switch("training.init_model_with_meta_device", False),
    )


def _frozen_parts(values: Values) -> Iterator[str]:
    """Yield the modules that Fun-ASR's sections freeze: ``audio_encoder_conf: {freeze: true}``."""
    model = values.at("model")
    for key in model if isinstance(model, Mapping) else ():
        if str(key).endswith("_conf") and values.switch(f"model.{key}.freeze", False):
            yield str(key).removesuffix("_conf")


def _sizes(values: Values) -> NativeSizes:
    def size(key: str) -> int | None:
        return values.integer(key, 0, least=1) or None

    shard = "parallel.fully_shard_parallel_size"
    return NativeSizes(
        fully_shard=None if values.at(shard) == "auto" else size(shard),
        tensor=values.integer("parallel.tensor_parallel_size", 1, least=1),
        ring=values.integer("parallel.ring_attention_size", 1, least=1),
        ulysses=values.integer("parallel.ulysses_parallel_size", 1, least=1),
        expert=values.integer("parallel.expert_parallel_size", 1, least=1),
        expert_fully_shard=size("parallel.expert_fully_shard_parallel_size"),
        data=size("parallel.data_parallel_size"),
        micro_batch=values.integer("training.micro_batch_size", 1, least=1),
        accumulation=values.integer("training.gradient_accumulation_steps", 1, least=1),
    )


def _sharding(values: Values) -> NativeSharding:
    plan = "parallel.fsdp_plan"
    return NativeSharding(
        apply_modules=values.texts(f"{plan}.apply_modules"),
        ignored_modules=values.texts(f"{plan}.ignored_modules"),
        hook_modules=values.texts(f"{plan}.hook_modules"),
        param_dtype=values.text(f"{plan}.param_dtype"),
        reduce_dtype=values.text(f"{plan}.reduce_dtype"),
        reshard_after_forward=values.switch(f"{plan}.reshard_after_forward", True),
        forward_prefetch=values.integer(f"{plan}.num_to_forward_prefetch", 0),
        backward_prefetch=values.integer(f"{plan}.num_to_backward_prefetch", 0),
        cpu_offload=values.switch(f"{plan}.cpu_offload", False),
        expert_modules=values.texts("parallel.ep_plan.apply_modules"),
    )


def _features(values: Values) -> NativeFeatures:
    def modules(switch: str, key: str) -> tuple[str, ...]:
        return values.texts(f"features.{key}.apply_modules") if values.switch(f"features.{switch}", False) else ()

    chunk_batch = modules("enable_chunk_mbs", "chunkmbs_plan")
    chunk_loss = values.switch("features.enable_chunk_loss", False)
    return NativeFeatures(
        recompute=modules("recompute", "recompute_plan"),
        offload=modules("enable_activation_offload", "activation_offload_plan"),
        chunk_batch=chunk_batch,
        chunk_batch_size=values.integer("features.chunkmbs_plan.chunk_mbs", 1, least=1) if chunk_batch else 0,
        chunk_loss_module=values.text("features.chunkloss_plan.apply_module", "lm_head") if chunk_loss else "",
        chunk_loss_size=values.integer("features.chunkloss_plan.chunk_size", 1024, least=1) if chunk_loss else 0,
        keep_attention=values.switch("model.skip_flash_attn_recompute", False),
    )
