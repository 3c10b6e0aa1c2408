"""Arguments of a search by ``--auto-parallel-mm`` beside the script's own, as Megatron's parser leaves them."""

from __future__ import annotations

from typing import Any

SEARCH_ARGUMENTS: dict[str, Any] = {
    "nnodes": 1,
    "node_rank": 0,
    "master_addr": "localhost",
    "master_port": 6000,
    "simulated_nnodes": 1,
    "simulated_nproc_per_node": 4,
    "global_batch_size": 8,
    "micro_batch_size": 1,
    "sequence_parallel": False,
    "use_distributed_optimizer": True,
    "auto_parallel_memory_limit_mib": None,
    "auto_parallel_launch_timeout_s": 60,
    "auto_parallel_profile": None,
    "pipeline_model_parallel_layout": None,
}
