"""What every forked program would do again and can do without."""

import contextlib
import functools
import multiprocessing.spawn
import os
import types
import weakref

import wrapt

_REPEATS = {
    "calibrate.replay": {"_BATCH_S": 1e-4, "_NUM_BATCHES": 3, "_NUM_COLLECTIVE_RUNS": 4},
    "measure.steps": {"_NUM_TIMED": 1, "_NUM_WARMUP_STEPS": 1, "_NUM_TIMED_STEPS": 3},
}
"""How often calls and steps are timed, by module of ``runtime/profiling``."""


def measure_briefly() -> None:
    """Have measurements repeat less: tests read that every time is there, and none depends on how steady it is."""
    for name, numbers in _REPEATS.items():

        def shorten(module: types.ModuleType, numbers: dict[str, float] = numbers) -> None:
            assert vars(module).keys() >= numbers.keys()
            vars(module).update(numbers)

        wrapt.register_post_import_hook(shorten, f"mindspeed_autoparallel.runtime.profiling.{name}")


def leave_senders_running() -> None:
    """Have no thread of the programs interrupt another when it wakes up.

    A message wakes gloo's thread of its receiver, which would interrupt the sender while it holds the lock of the
    connection. The answer then wakes the sender's own thread of gloo, which polls until it gets that lock.
    """
    with contextlib.suppress(AttributeError, OSError):  # the system has no such policy, or does not allow it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def share_managers() -> None:
    """Start the process of a ``multiprocessing`` manager without the script, which it has no use for.

    Megatron starts one per rank that saves, and a spawned process imports the script, and Megatron with it.
    """
    prepare = multiprocessing.spawn.get_preparation_data

    def prepare_manager(name: str) -> dict:
        found = prepare(name)
        return {key: value for key, value in found.items() if "Manager" not in name or not key.startswith("init_main")}

    multiprocessing.spawn.get_preparation_data = prepare_manager


def share_gloo_devices() -> None:
    """Have torch's own function for a gloo group, but for the device: that of the process."""
    from torch.distributed import distributed_c10d as c10d

    devices: dict[int, object] = {}

    def make(given: object, backend_options: object) -> object:
        options = c10d.ProcessGroupGloo._Options()
        if os.getpid() not in devices:
            devices[os.getpid()] = c10d.ProcessGroupGloo.create_default_device()
        options._devices, options._timeout = [devices[os.getpid()]], given.timeout
        options.enable_reconfigure = given.enable_reconfigure
        group = c10d.ProcessGroupGloo(given.store, given.group_rank, given.group_size, options)
        group.options.global_ranks_in_group, group.options.group_name = given.global_ranks_in_group, given.group_id
        return group

    c10d.Backend._ensure_backend_registered(c10d.Backend.GLOO)
    plugin = c10d.Backend._plugins[c10d.Backend.GLOO.upper()]
    c10d.Backend._plugins[c10d.Backend.GLOO.upper()] = plugin._replace(creator_fn=make)


def keep_libraries() -> None:
    """Leave torch's libraries of operators whole when a program ends: taking them apart costs as much as the fork."""
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        found = one.peek()
        if found and found[1].__module__ == "torch.library":
            one.atexit = False


def list_operators_once() -> None:
    """Have ``torch.export`` put torch's own composite operators into ``torch.ops`` once, not at every rewrite of a program."""
    from torch._export import utils

    utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)
