"""A common interface to read and write the files of all FSDP2 trainers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_text
from mindspeed_autoparallel.hosts.host_file import HostFile, Modules, Written
from mindspeed_autoparallel.hosts.megatron_fsdp2 import flags_beside, read_megatron
from mindspeed_autoparallel.hosts.megatron_own_fsdp import USE_MEGATRON_FSDP
from mindspeed_autoparallel.hosts.mindspeed_mm import NativeConfig, is_native, read_native
from mindspeed_autoparallel.hosts.mindspeed_mm_decisions import decided_values, read_decisions, sharding_host
from mindspeed_autoparallel.hosts.script import Script, read_script
from mindspeed_autoparallel.hosts.trainer_decisions import trainer_decisions, trainer_host, trainer_values
from mindspeed_autoparallel.hosts.trainers import TrainerFile, read_trainer_file
from mindspeed_autoparallel.profiles.sharded import Described, ElementBytes, Routing
from mindspeed_autoparallel.spec.sharded import ShardedDecisions

NATIVE_TOKENS = "data.dataset_param.basic_parameters.cutoff_len"
ADAPTERS = "peft: adapters are not priced; every parameter is taken to be trained, which needs more memory and time"
_SENDS_ONCE = ("deepep", "hybridep", "uccl_ep")
BYTES_OF_TYPE = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}


def open_host_file(path: Path) -> HostFile:
    """Read a file of MindSpeed-MM's native trainer or of one of ``trainers.TRAINERS``, or a launch script of Megatron.

    Raises ``ConfigError`` for other files, and for settings that a plan cannot describe.
    """
    if path.suffix in (".sh", ".bash"):
        return host_of_script(read_script(path))
    if is_native(read_text(path, "the configuration")):
        return _native(read_native(path))
    return _of_trainer(read_trainer_file(path))


def with_global_batch(decisions: ShardedDecisions, global_batch: int) -> ShardedDecisions:
    """Return ``decisions`` with the accumulation that makes their global batch; raises if none does."""
    sizes = replace(decisions.sizes, accumulation=1)
    if global_batch % sizes.global_batch_size:
        raise ConfigError(
            f"--global-batch-size {global_batch} is not a multiple of the {sizes.global_batch_size} samples of a micro "
            "batch on all devices."
        )
    return replace(decisions, sizes=replace(sizes, accumulation=global_batch // sizes.global_batch_size))


def host_of_script(script: Script) -> HostFile:
    """Return what a launch script of Megatron decides; raises like ``open_host_file``."""
    path, named = Path(script.path), script.given("--fsdp2-config-path")
    if script.given("--use-custom-fsdp") is not None:
        raise ConfigError(f"{path}: --use-custom-fsdp is the old name of what {USE_MEGATRON_FSDP} does from 0.19 on.")
    if script.given(USE_MEGATRON_FSDP) is not None:
        return read_megatron(script)
    if script.given("--use-torch-fsdp2") is None:
        raise ConfigError(
            f"{path} has neither --use-torch-fsdp2 nor {USE_MEGATRON_FSDP}: plan its Megatron layout without --fsdp2."
        )
    if named is None:
        return read_megatron(script)
    # The path is relative to the start folder: one of the script's parent folders.
    found = next((place / named for place in path.absolute().parents if (place / named).is_file()), None)
    if found is None:
        raise ConfigError(f"{path}: --fsdp2-config-path {named} is in none of the script's parent folders.")
    file = read_trainer_file(found)
    return _of_trainer(replace(file, given=flags_beside(script, file.trainer.words)))


def _native(config: NativeConfig) -> HostFile:
    def written(decisions: ShardedDecisions, modules: Modules) -> Written:
        return Written(text=config.with_values(decided_values(config, decisions, modules)))

    return HostFile(
        path=config.path,
        described=Described(
            sequence=config.values.integer(NATIVE_TOKENS, 0),
            frozen=config.frozen,
            micro_batch_size=config.sizes.micro_batch,
            bytes_of=ElementBytes(reduced=BYTES_OF_TYPE.get(config.sharding.reduce_dtype, 4)),
            eager=config.values.text("model.attn_implementation") == "eager",
        ),
        tokens_key=NATIVE_TOKENS,
        states_batch=True,
        host=lambda npu: sharding_host(config, npu),
        decisions=lambda modules, devices, npu: read_decisions(config, modules, devices, npu),
        written=written,
    )


def _of_trainer(file: TrainerFile) -> HostFile:
    keys, values = file.trainer, file.values

    def written(decisions: ShardedDecisions, modules: Modules) -> Written:
        changed, words = trainer_values(file, decisions, modules)
        return Written(text=file.with_values(changed), words=words)

    return HostFile(
        path=file.path,
        described=Described(
            sequence=(values.integer(keys.tokens, 0) if keys.tokens else 0) or file.given.get("tokens", 0),
            micro_batch_size=file.size(keys.micro_batch) or file.given.get("micro_batch_size", 1),
            bytes_of=_bytes_of(file),
            tensor_size=file.tensor_size,
            sequence_parallel=bool(keys.sequence_parallel) and values.switch(keys.sequence_parallel, False),
            loops_experts=_loops_experts(file),
            routing=_routing(file),
        ),
        tokens_key=keys.tokens or "length of samples",
        notes=(ADAPTERS,) if values.tree.get("peft") else (),
        states_batch=bool(file.size(keys.global_batch) or file.size(keys.accumulation)),
        host=lambda npu: trainer_host(file),
        decisions=lambda modules, devices, npu: trainer_decisions(file, modules, devices),
        written=written,
    )


def _bytes_of(file: TrainerFile) -> ElementBytes:
    keys, values = file.trainer, file.values
    reduced = BYTES_OF_TYPE.get(values.text(keys.reduced), 4) if keys.reduced else 4
    stored_as = (values.text(keys.stored) or keys.unset_stored).removeprefix("torch.")
    stored = BYTES_OF_TYPE.get(stored_as, 2) if keys.stored else 4
    return ElementBytes(sharded=stored, optimizer=2 * stored, reduced=reduced)


def _routing(file: TrainerFile) -> Routing:
    """Return how NeMo Automodel's kernels send tokens; other trainers send every copy."""
    key, values = "model.backend", file.values
    once = file.trainer.name == "NeMo Automodel" and values.text(f"{key}.dispatcher") in _SENDS_ONCE
    return Routing(once=once, in_order=once and values.switch(f"{key}.fake_balanced_gate", False))


def _loops_experts(file: TrainerFile) -> bool:
    """Return whether MindSpeed-LLM runs experts one after another, as its defaults do."""
    grouped = file.values.switch("optimization.moe_grouped_gemm", False)
    dispatcher = file.values.text("parallel.ep_dispatcher")
    return file.trainer.name == "MindSpeed-LLM" and not grouped and dispatcher in ("", "eager")
