"""A YAML of MindSpeed-MM's native FSDP2 trainer: entries that fail, have no effect, or cost memory unnoticed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_text
from mindspeed_autoparallel.hosts.mindspeed_mm import NativeConfig, read_native
from mindspeed_autoparallel.hosts.mindspeed_mm_checks import idle_keys
from mindspeed_autoparallel.hosts.patterns import EVERY_INDEX, compile_pattern, matching_names
from mindspeed_autoparallel.hosts.trainers import read_trainer_file
from mindspeed_autoparallel.runtime.doctor.finding import Finding, advice, fine, problem, unknown

_LISTS = (
    "parallel.fsdp_plan.apply_modules",
    "parallel.fsdp_plan.hook_modules",
    "parallel.fsdp_plan.ignored_modules",
    "parallel.ep_plan.apply_modules",
    "features.recompute_plan.apply_modules",
    "features.activation_offload_plan.apply_modules",
    "features.chunkmbs_plan.apply_modules",
)
_INDEX = "model.safetensors.index.json"


def check_native_file(path: Path) -> list[Finding]:
    """Return the findings of all checks; a single one if the file cannot be read, or is another trainer's."""
    try:
        config = read_native(path)
    except ConfigError as error:
        with contextlib.suppress(ConfigError):
            trainer = read_trainer_file(path).trainer.name
            return [unknown("fsdp2 file", f"{path.name} is a file of {trainer}: it is not checked")]
        return [problem("fsdp2 file", str(error), "The trainer stops before it builds the model.")]
    checks = (_keys, _patterns, _module_names, _prefetch_order, _offload, _experts, _chunks, _defaults, _wrapping)
    found = [finding for check in checks for finding in check(config)]
    return found or [fine("fsdp2 file", f"{path.name}: no finding")]


def _keys(config: NativeConfig) -> Iterator[Finding]:
    for idle in idle_keys(config):
        why = "The trainer accepts any key but never reads this one."
        yield advice("fsdp2 keys", f"{idle.key} has no effect", why, f"set {idle.instead}" if idle.instead else "")


def _patterns(config: NativeConfig) -> Iterator[Finding]:
    for key in _LISTS:
        seen: list[str] = []
        for pattern in config.values.texts(key):
            try:
                compile_pattern(pattern)
            except ConfigError as error:
                yield problem("fsdp2 patterns", f"{key}: {error}", "The trainer raises while it builds the model.")
            if pattern in seen and "recompute" in key:
                yield advice(
                    "fsdp2 patterns",
                    f"{key} lists {pattern} twice",
                    "Its modules are recomputed twice, one in the other.",
                )
            seen.append(pattern)


def _module_names(config: NativeConfig) -> Iterator[Finding]:
    names = _checkpoint_modules(config)
    if not names:
        yield unknown(
            "fsdp2 patterns", f"{_INDEX} of the model is not here: patterns were not compared with its modules"
        )
        return
    for key in _LISTS:
        for pattern in config.values.texts(key):
            try:
                matched = matching_names([pattern], names)
            except ConfigError:
                continue
            if not matched:
                why = "A list of which no pattern matches ends the training; where others match, this one does nothing."
                yield advice("fsdp2 patterns", f"{key}: {pattern} matches no module of {config.model_path}", why)


def _checkpoint_modules(config: NativeConfig) -> Sequence[str]:
    """Return the modules that hold weights in the model's checkpoint, and their parents."""
    try:
        weights = json.loads(read_text(Path(config.model_path) / _INDEX, "the model's index"))["weight_map"]
    except (ConfigError, ValueError, KeyError, TypeError):
        return ()
    names: set[str] = set()
    for weight in weights:
        parts = str(weight).split(".")[:-1]
        names |= {".".join(parts[: end + 1]) for end in range(len(parts))}
    return sorted(names)


def _prefetch_order(config: NativeConfig) -> Iterator[Finding]:
    sharding = config.sharding
    if not sharding.forward_prefetch and not sharding.backward_prefetch:
        return
    order = list(sharding.apply_modules)
    for place, child in enumerate(order):
        parent = next((one for one in order[place + 1 :] if child.startswith(f"{one}.")), None)
        if parent is not None and EVERY_INDEX in child:
            yield advice(
                "fsdp2 prefetch",
                f"apply_modules lists {child} before {parent}, and prefetch is on",
                "Prefetch follows this list: the last module after the layers, often lm_head, is gathered before the "
                "first layer and held through the whole forward.",
                f"list {parent} before {child}",
            )
            break
    embedding = next((place for place, one in enumerate(order) if one.endswith("embed_tokens")), None)
    tower = next((place for place, one in enumerate(order) if "visual" in one), None)
    if config.model_id.startswith("qwen3_vl") and embedding is not None and tower is not None and tower < embedding:
        yield advice(
            "fsdp2 prefetch",
            f"apply_modules lists {order[tower]} before {order[embedding]}, which Qwen3-VL runs first",
            "The last vision module gathers the embedding again, which stays whole until its backward.",
            f"list {order[embedding]} before {order[tower]}",
        )


def _offload(config: NativeConfig) -> Iterator[Finding]:
    offload = config.features.offload
    for pattern in offload:
        after = pattern.partition(EVERY_INDEX)[2]
        if after:
            why = "The trainer ignores everything after {*} in this list and offloads the members of the stack."
            yield advice("fsdp2 offload", f"activation_offload_plan: {pattern} offloads whole layers", why)
    if offload and not any("{" in pattern or "*" in pattern for pattern in offload) and len(offload) == 1:
        why = "The last block of the list is never moved, so a list of one moves nothing."
        yield advice("fsdp2 offload", f"activation_offload_plan has {offload[0]} alone", why, "leave offload off")
    elif offload:
        why = "The input of the last block in the list is never moved: of k blocks k - 1 are."
        yield fine("fsdp2 offload", f"activation_offload_plan: {', '.join(offload)}. {why}")


def _experts(config: NativeConfig) -> Iterator[Finding]:
    experts = config.sharding.expert_modules
    if experts and config.sizes.expert == 1 and not set(experts) & set(config.sharding.apply_modules):
        yield advice(
            "fsdp2 experts",
            f"expert_parallel_size is 1 with ep_plan {', '.join(experts)}",
            "Every rank gathers all experts of a layer, together with the layer, in forward and in backward.",
            "compare with expert_parallel_size above 1: mindspeed-autoparallel plan --fsdp2",
        )
    if config.sizes.expert > 1 and not experts:
        why = "The mesh of experts is made and no module is divided by it."
        yield advice("fsdp2 experts", f"expert_parallel_size {config.sizes.expert} without ep_plan.apply_modules", why)


def _chunks(config: NativeConfig) -> Iterator[Finding]:
    features = config.features
    for pattern in features.chunk_batch:
        for name, listed in (("recompute_plan", features.recompute), ("activation_offload_plan", features.offload)):
            if pattern not in listed:
                why = "Without recomputation and offload of the same modules, chunks keep what the whole batch keeps."
                yield advice(
                    "fsdp2 chunks", f"chunkmbs_plan lists {pattern}, which {name} lacks", why, f"add it to {name}"
                )


def _defaults(config: NativeConfig) -> Iterator[Finding]:
    if config.features.recompute and not config.values.has("features.recompute_plan.use_reentrant"):
        yield fine(
            "fsdp2 defaults", "recompute_plan.use_reentrant is False by default (docs/zh/features/fsdp2.md: True)"
        )
    if config.features.keep_attention and not config.features.recompute:
        why = "Only a recomputed layer has outputs of attention to keep."
        yield advice("fsdp2 defaults", "model.skip_flash_attn_recompute is set and nothing is recomputed", why)


def _wrapping(config: NativeConfig) -> Iterator[Finding]:
    if not config.sharding.apply_modules:
        why = "The whole model is then one unit: it is gathered at once, and nothing overlaps."
        yield advice("fsdp2 units", "parallel.fsdp_plan.apply_modules is empty", why, "list the layers of every stack")
    if config.sizes.fully_shard == 1 and not config.meta_init:
        why = "The trainer then uses DistributedDataParallel and reads nothing of fsdp_plan but its dtype."
        yield advice("fsdp2 units", "fully_shard_parallel_size is 1 without init_model_with_meta_device", why)
