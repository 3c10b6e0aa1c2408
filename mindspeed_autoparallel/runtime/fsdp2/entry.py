"""Entry of ``mindspeed_autoparallel.plugin``: reads the flags after the YAML and prepares the trainer for them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mindspeed_autoparallel.errors import AutoParallelError, ConfigError
from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.hosts.mindspeed_mm_checks import shard_sizes
from mindspeed_autoparallel.runtime.devices.selection import current_device
from mindspeed_autoparallel.runtime.fsdp2.apply import prepare_plan
from mindspeed_autoparallel.runtime.fsdp2.flags import read_native_flags
from mindspeed_autoparallel.runtime.fsdp2.preflight import run_and_exit
from mindspeed_autoparallel.runtime.fsdp2.rank_alone import prepare_rank
from mindspeed_autoparallel.runtime.fsdp2.trainer import NativeTrainer, end_with, running_trainer, say, world_size
from mindspeed_autoparallel.runtime.megatron.features import TASK_VARIABLE


def install() -> None:
    """Prepare the running trainer for the flags after the YAML; an invalid one ends every process with an error."""
    try:
        native = running_trainer()
        if task_file := os.environ.get(TASK_VARIABLE):
            prepare_rank(native, read_json(Path(task_file), "task of this process"))
            return
        request = read_native_flags(sys.argv[1:])
        if not (request.search.auto_parallel_mm or request.is_preflight or request.plan):
            say("no flag of mindspeed_autoparallel follows the YAML: the training is unchanged")
            return
        check_model_folder(native)
        if request.is_preflight:
            run_and_exit(native, request)
        elif request.search.auto_parallel_mm:
            shard_sizes(native.config, world_size(), current_device().name == "npu")
            from mindspeed_autoparallel.runtime.fsdp2.search import prepare_search

            prepare_search(native, request)
        else:
            prepare_plan(native, request)
    except AutoParallelError as error:
        end_with(error)


def check_model_folder(native: NativeTrainer) -> None:
    """Raise ``ConfigError`` if the model's folder is missing; the host resolves names on the Hugging Face hub."""
    path = native.config.model_path
    if path.startswith(("/", ".", "~")) and not Path(path).expanduser().is_dir():
        raise ConfigError(
            f"{native.config.path}: model.model_name_or_path {path} is not a folder; download the model first."
        )
