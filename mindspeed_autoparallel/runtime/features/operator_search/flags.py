"""Flags of ``--operator-search``."""

from dataclasses import dataclass

from mindspeed_autoparallel.runtime.flags.flag import FlagGroup, flag


@dataclass(frozen=True, kw_only=True)
class OperatorSearchFlags(FlagGroup):
    """Flags of ``--operator-search``; the request checks ranges, with clearer messages than argparse."""

    TITLE = "operator-search: a strategy per operator"

    operator_search: bool = flag(
        False,
        "Search a strategy for every operator of the model that the script's flags describe, write it with "
        "the Megatron configuration derived from it, and exit before training.",
    )
    operator_config: str | None = flag(
        None, "YAML with use_parallel, parallel and parallel_config; the flags below override it.", metavar="YAML"
    )
    parallel_mode: int | None = flag(None, "Data parallel, pins spread, or searched (default).", metavar="0|1|2")
    search_mode: str | None = flag(None, "recursive_programming (default), sharding_propagation or exact.")
    auto_pipeline: bool = flag(False, "Choose the number of pipeline stages, up to the number of microbatches.")
    mem_coeff: float | None = flag(
        None,
        "Split products by symbolic costs: values below 1 favour data parallelism, above 1 model parallelism. By "
        "default each split takes the least modelled time.",
    )
    operator_pin: str | None = flag(
        None, "Operators to fix, such as 'layers.*.q:rows=4,columns=2;output:columns=8'.", metavar="OP:AXIS=PARTS[;..]"
    )
    operator_explain: str | None = flag(
        None, "Print the costs of each split of this operator, and the mem_coeff to set.", metavar="OP"
    )
    operator_devices: int | None = flag(
        None,
        "Devices to plan for. Default: the simulated cluster, or the processes that were started.",
        metavar="N",
        least=1,
    )
    operator_output_dir: str = flag(".", "Directory of operator_plan.json and operator_plan.html.", metavar="DIR")
