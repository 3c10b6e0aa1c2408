"""The environment of the children: what a training needs, nothing inherited from a launcher above us."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_autoparallel.redaction import is_secret_variable

ALLOWED_NAMES = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LC_ALL",
        "TMPDIR",
        "TMP",
        "TEMP",
        "TERM",
        "TZ",
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "NO_PROXY",
        "no_proxy",
        "COMBINED_ENABLE",
        "CPU_AFFINITY_CONF",
        "TASK_QUEUE_ENABLE",
        "HOST_CACHE_CAPACITY",
        "MULTI_STREAM_MEMORY_REUSE",
        "SSL_CERT_FILE",
        "XDG_CACHE_HOME",
    }
)
"""Names a child may see. Anything else (tokens, passwords) stays out of the children and of their logs."""

ALLOWED_PREFIXES = (
    "ACLNN_",
    "ASCEND_",
    "CUBLAS_",
    "CUDA_",
    "CUDNN_",
    "GLOO_",
    "GOMP_",
    "HCCL_",
    "HF_HOME",
    "KMP_",
    "LCCL_",
    "MEGATRON_",
    "MINDSPEED_",
    "MKL_",
    "NCCL_",
    "NPU_",
    "NVIDIA_",
    "NVTE_",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH_",
    "TOKENIZERS_",
    "TORCH",
    "TRITON_",
    "TRANSFORMERS_OFFLINE",
)

_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_ASYNC", "OMPI_", "PMI_", "SLURM_", "OOTB_OPTIMIZER_")
_LAUNCHER_NAMES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT"}
)


def child_environment(parent: Mapping[str, str], additions: Mapping[str, str]) -> dict[str, str]:
    """The allow-listed part of ``parent`` plus ``additions``; ``parent`` itself is left alone."""
    kept = {
        name: value
        for name, value in parent.items()
        if (name in ALLOWED_NAMES or name.startswith(ALLOWED_PREFIXES))
        and name not in _LAUNCHER_NAMES
        and not name.startswith(_LAUNCHER_PREFIXES)
        and not is_secret_variable(name)
    }
    return {**kept, **additions}
