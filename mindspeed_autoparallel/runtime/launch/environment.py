"""The environment of the children: the user's own, less what a launcher above us set for its processes."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_autoparallel.redaction import is_secret_variable, known_values, with_encoded

_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "SLURM_STEP", "OOTB_OPTIMIZER_")
_LAUNCHER_NAMES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
        *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASK_PID"),
        *("SLURM_GTIDS", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
    }
)
"""What torchrun, mpirun and srun tell each of their processes; ours are started by us."""

_SHORTEST_SECRET = 6
"""Masking shorter values would take numbers and words out of logs."""


def child_environment(parent: Mapping[str, str], additions: Mapping[str, str]) -> dict[str, str]:
    """Return ``parent`` without what its launcher set, plus ``additions``; ``parent`` itself is left alone.

    The user's script runs in the children: what it reads of the environment (paths, switches, the token of its
    tokenizer) it must find there. Secrets are masked where things are written: see ``secret_variables``.
    """
    kept = {
        name: value
        for name, value in parent.items()
        if name not in _LAUNCHER_NAMES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    return {**kept, **additions}


def secret_variables(environment: Mapping[str, str]) -> frozenset[str]:
    """Return the values of ``environment`` that their name or their form shows to be secret, to be masked in logs, as
    they are and in base64."""
    named = {value for name, value in environment.items() if is_secret_variable(name)}
    formed = {found for value in environment.values() for found in known_values(value)}
    return with_encoded(value for value in named | formed if len(value) >= _SHORTEST_SECRET)
