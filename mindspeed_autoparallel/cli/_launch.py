"""A plan as flags of its host: Megatron-LM, or MindSpeed-LLM on Ascend."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_autoparallel.errors import ConfigError, PlanError, flag_of

if TYPE_CHECKING:
    from mindspeed_autoparallel.spec import Plan

MEGATRON, MINDSPEED_LLM, MINDSPEED_MM = "megatron-lm", "mindspeed-llm", "mindspeed-mm"


def host_of(plan: Plan) -> str:
    """Return the host that trains on the plan's device: MindSpeed's on Ascend, Megatron-LM elsewhere."""
    if not any(word in plan.profile.device.lower() for word in ("ascend", "910")):
        return MEGATRON
    return MINDSPEED_LLM if len(plan.model.modules) == 1 else MINDSPEED_MM


_LAYOUT_STRINGS, _FLEX_BACKENDS, _SHARED_GROUPS = (0, 13), (0, 15), (0, 16)
"""First releases of Megatron-LM with ``--pipeline-model-parallel-layout`` and ``--moe-flex-dispatcher-backend``. The
last is the first release, of those read, that accepts TP as a multiple of the key/value groups: 0.12 refuses it, 0.16
accepts it."""
NEWEST = (0, 20)


def release_of(text: str | None) -> tuple[int, int]:
    """Return ``0.12`` or ``0.12.1`` as numbers; the newest release where ``text`` is ``None``."""
    if text is None:
        return NEWEST
    numbers = text.removeprefix("core_").lstrip("vr").split(".")[:2]
    if len(numbers) < 2 or not all(number.isdecimal() for number in numbers) or int(numbers[0]) > 9:
        raise ConfigError(f"--megatron-release must be a release of Megatron-LM such as 0.12 or 0.16.1, got {text!r}.")
    major, minor = map(int, numbers)
    if (major, minor) < (0, 12):
        raise ConfigError(f"--megatron-release {text}: flags are known for 0.12 and newer.")
    return major, minor


def launch_flags(plan: Plan, host: str, num_mtp_layers: int = 0, release: tuple[int, int] = NEWEST) -> list[str]:
    """Return the flags of the plan's layout, switches and recompute to ``host``.

    ``release``: of Megatron-LM. Raises ``PlanError`` for what no flag of the host states (``--auto-parallel-plan``
    trains such a plan), and ``ConfigError`` for what the release cannot train.
    """
    from mindspeed_autoparallel.runtime.megatron.layout_arguments import group_arguments, native_flags, stage_arguments

    tensor = plan.layout.tensor_size
    for module in plan.model.modules:
        if host == MEGATRON and release < _SHARED_GROUPS and module.num_kv_heads % tensor:
            raise ConfigError(
                f"TP {tensor} beside {module.num_kv_heads} key/value groups needs Megatron-LM 0.16 or newer, got "
                f"--megatron-release {release[0]}.{release[1]}. Train with a newer one."
            )
    if plan.layout.modules:
        raise PlanError(f"{', '.join(plan.layout.modules)} have a layout of their own.")
    if host == MINDSPEED_MM and plan.layout.num_virtual_stages > 1:
        raise PlanError("MindSpeed-MM reads the layers of each stage from model.json.")
    if plan.layout.schedule == "gpipe":
        raise PlanError("Megatron has no schedule that runs all forwards first.")
    arguments = argparse.Namespace(microbatch_group_size_per_vp_stage=None, mtp_num_layers=num_mtp_layers)
    if host == MEGATRON and release >= _LAYOUT_STRINGS:
        arguments.pipeline_model_parallel_layout = None
    elif host != MEGATRON:
        arguments.num_layer_list = arguments.noop_layers = None
    try:
        stages = {**_stages(plan, arguments, stage_arguments(plan, arguments)), **group_arguments(plan, arguments)}
    except PlanError as error:
        # The advice is for a script that was given the plan.
        raise PlanError(str(error).removesuffix(" Search it again.")) from None
    return [*native_flags(plan, stages), *switches(plan, host, release), *_recompute(plan)]


def flags_line(plan: Plan, num_mtp_layers: int = 0) -> str:
    """Return the line that ``plan`` prints: the flags of the plan's host, or why no flags describe the plan."""
    host = host_of(plan)
    try:
        left = without_flags(plan, host)
        beside = f"; priced with {', '.join(left)} too, for which no flag is known here" if left else ""
        return f"flags of {host}: {shlex.join(launch_flags(plan, host, num_mtp_layers))}{beside}"
    except PlanError as error:
        return f"no flags of {host} describe this plan: {error} Train with --auto-parallel-plan plan.json (--out)."


def write_page(plan: Plan, path: Path, num_mtp_layers: int) -> None:
    """Write the page of ``plan`` with the flags of its host, and print its path to standard error."""
    from mindspeed_autoparallel.files import write_text_atomic
    from mindspeed_autoparallel.report import render_page

    write_text_atomic(path, render_page(plan, flags_line(plan, num_mtp_layers)))
    print(f"page: {path}", file=sys.stderr)


def _stages(
    plan: Plan, arguments: argparse.Namespace, found: dict[str, int | str | None]
) -> dict[str, int | str | None]:
    """Return the split's arguments; an even one needs no layout string."""
    counts = plan.layers_of(plan.model.modules[-1].name)
    ahead = any(stage.prediction for stage in plan.stages)
    if len(set(counts)) > 1 or ahead or len(plan.model.modules) > 1:
        return found
    return {"num_layers_per_virtual_pipeline_stage": counts[0]} if plan.layout.virtual_size > 1 else {}


def switches(plan: Plan, host: str, release: tuple[int, int] = NEWEST) -> list[str]:
    """Return the flags of switches that the plan's price depends on and that its sizes do not imply."""
    layout = plan.layout
    words = ["--overlap-param-gather"] if layout.overlap_gradient_reduce and layout.distributed_optimizer else []
    if layout.overlap_tensor_parallel and host == MEGATRON:
        words.append("--tp-comm-overlap")
    if layout.expert_size > 1:
        across = layout.expert_size * layout.ranks_of_expert > plan.cluster.devices_per_node
        # DeepEP, which sends a token to a node once, is NVIDIA's alone.
        named = ["--moe-flex-dispatcher-backend", "deepep"] if release >= _FLEX_BACKENDS else ["--moe-enable-deepep"]
        deep = ["flex", *named]
        words += ["--moe-token-dispatcher-type", *(deep if across and host == MEGATRON else ["alltoall"])]
    if layout.context_size > 1 and host != MEGATRON:
        words += ["--context-parallel-algo", "megatron_cp_algo"]
    return words + _of_training(plan, host, release)[0]


def without_flags(plan: Plan, host: str, release: tuple[int, int] = NEWEST) -> tuple[str, ...]:
    """Return the switches that the plan's price depends on and ``host`` has no flag for, as a request's keys."""
    return tuple(f"train.{key}" for key in _of_training(plan, host, release)[1])


def _of_training(plan: Plan, host: str, release: tuple[int, int]) -> tuple[list[str], tuple[str, ...]]:
    from mindspeed_autoparallel.predict.train_flags import Host, flags_of_switches
    from mindspeed_autoparallel.runtime.megatron.layout_arguments import takes_pairs

    train = plan.profile.train or {"precision": "bf16"}
    refused = {"moe_a2a_overlap"} if train.get("moe_a2a_overlap") and not takes_pairs(plan) else set()
    taken = {key: value for key, value in train.items() if key not in refused}
    words, left = flags_of_switches(taken, Host(on_ascend=host != MEGATRON, release=release))
    return words, (*left, *refused)


def _recompute(plan: Plan) -> list[str]:
    """Return Megatron's recompute flags, which hold for every stage alike. Raises ``PlanError`` where stages differ."""
    from mindspeed_autoparallel.runtime.megatron.layout_arguments import kind_everywhere, recompute_arguments

    name = plan.model.modules[-1].name
    counts, full = plan.layers_of(name), plan.recomputed_of(name, "full")
    kind = kind_everywhere(plan)
    number = 0
    if kind is None and any(full):
        kind, numbers = "full", {again for again, held in zip(full, counts, strict=True) if again != held}
        if len(numbers) > 1 or any(held < max(numbers) for held in counts if numbers and held):
            raise PlanError(
                f"stages recompute {list(full)} layers of {list(counts)}, but Megatron's flags apply to all stages "
                "alike: train with --auto-parallel-plan."
            )
        number = max(numbers, default=0)
    if kind is None:
        return []
    words: list[str] = []
    for destination, value in recompute_arguments(kind, number).items():
        if value is not None:
            values = value if isinstance(value, list) else [value]
            words += [flag_of(destination), *map(str, values)]
    return words
