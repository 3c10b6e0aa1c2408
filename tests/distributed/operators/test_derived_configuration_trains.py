"""The Megatron configuration derived from a plan trains a GPT with the losses of one process."""

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
from ranks import run_ranks

from mindspeed_autoparallel.operators import search_graph
from mindspeed_autoparallel.operators.lowering.megatron import derive_megatron
from mindspeed_autoparallel.operators.pipeline import Pipeline, search_pipelined
from mindspeed_autoparallel.operators.presets import Decoder, decoder_graph

pytestmark = [pytest.mark.distributed, pytest.mark.torch, pytest.mark.megatron]

WORKER = Path(__file__).parents[1] / "devices" / "gpt_layouts.py"
# The model, batch and sequence of the worker.
SHAPE = Decoder(num_layers=4, hidden=32, heads=4, kv_heads=4, ffn=128, vocabulary=128, gated=False)
GRAPH = decoder_graph(SHAPE, batch=8, sequence=16)
SHAPE_OF_EXPERTS = dataclasses.replace(SHAPE, num_experts=4, topk=2)
# As the worker's case "moe".
ALLTOALL = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "add_bias_linear": False,
    "moe_aux_loss_coeff": 0.0,
    "moe_token_dispatcher_type": "alltoall",
}


def case_of(configuration):
    """The worker's case for the derived flags."""
    flags = configuration.flags()
    sizes = {
        "--tensor-model-parallel-size": "tp",
        "--pipeline-model-parallel-size": "pp",
        "--context-parallel-size": "cp",
    }
    case = {key: int(flags[flags.index(flag) + 1]) for flag, key in sizes.items()}
    case["batch"] = configuration.global_batch_size
    if "--expert-model-parallel-size" in flags:
        ep = int(flags[flags.index("--expert-model-parallel-size") + 1])
        return {**case, "ep": ep, "experts": SHAPE_OF_EXPERTS.num_experts, "config": ALLTOALL}
    if "--sequence-parallel" in flags:
        case["config"] = {"sequence_parallel": True}
    return case


def assert_trains_as_one_process(found):
    cases = [case_of(configuration) for configuration in found]
    alone_cases = [
        {"batch": c["batch"], **({"experts": 4, "config": ALLTOALL} if "experts" in c else {})} for c in cases
    ]
    alone_names = [json.dumps(case) for case in alone_cases]
    (alone,) = run_ranks(1, WORKER, *dict.fromkeys(alone_names), timeout_s=300)
    names = [json.dumps(case) for case in cases]
    ranks = run_ranks(4, WORKER, *names, timeout_s=400)
    for name, alone_name in zip(names, alone_names, strict=True):
        expected = alone.result["cases"][alone_name]
        assert len(set(expected["losses"])) > 1, "it trains"
        reported = [rank.result["cases"][name] for rank in ranks]
        (losses,) = {tuple(case["losses"]) for case in reported if case["losses"][0] is not None}
        assert losses == pytest.approx(expected["losses"], rel=2e-6), name
        assert reported[0]["norms"] == pytest.approx(expected["norms"], rel=2e-5), name


def test_derived_configurations_train_with_the_losses_and_norms_of_one_process():
    found = [
        derive_megatron(search_graph(GRAPH, 4, mem_coeff=1e-3)),
        derive_megatron(search_graph(GRAPH, 4, mem_coeff=1e6)),
        derive_megatron(search_graph(GRAPH, 4, search_mode="exact", pins={"layers.*.up": {"rows": 2, "columns": 2}})),
        derive_megatron(search_pipelined(GRAPH, 4, mem_coeff=1e6, pipeline=Pipeline(2, 1, 8))),
    ]
    layouts = [(f.layout.data_size, f.layout.tensor_size, f.layout.pipeline_size) for f in found]
    assert layouts == [(4, 1, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)]
    assert found[2].layout.sequence_parallel
    # Eight microbatches of one sample: on a stage only tokens of a sample are left to cut by rows.
    by_rows = {"search_mode": "exact", "pins": {"layers.*.up": {"rows": 2}}}
    with_context = derive_megatron(search_pipelined(GRAPH, 4, pipeline=Pipeline(2, 1, 8), **by_rows))
    assert with_context.layout.label() == "PP2 TP1 DP1 MBS1 CP2"
    experts = decoder_graph(SHAPE_OF_EXPERTS, batch=8, sequence=16)
    pins = {f"layers.*.experts.{part}": {"experts": 4} for part in ("up", "down")}
    found.append(derive_megatron(search_graph(experts, 4, search_mode="exact", pins={**pins, "*.q": {"rows": 4}})))
    assert (found[4].layout.data_size, found[4].layout.expert_size) == (4, 4)
    found.append(with_context)
    assert_trains_as_one_process(found)


def test_fewer_samples_than_devices_give_context_parallelism_that_trains_as_one_process():
    one, two = (decoder_graph(SHAPE, batch=batch, sequence=16) for batch in (1, 2))
    found = [
        derive_megatron(search_graph(one, 4, mem_coeff=0.1)),
        derive_megatron(search_graph(one, 4, mem_coeff=1)),
        derive_megatron(search_graph(one, 4, mem_coeff=1, pins={"layers.*.up": {"rows": 2, "columns": 2}})),
        derive_megatron(search_graph(two, 4, mem_coeff=0.1)),
    ]
    layouts = [f.layout.label() for f in found]
    assert layouts == [
        "PP1 TP1 DP1 MBS1 CP4",
        "PP1 TP2 DP1 MBS1 CP2",
        "PP1 TP2 DP1 MBS1 CP2 SP",
        "PP1 TP1 DP2 MBS1 CP2",
    ]
    assert_trains_as_one_process(found)
