"""Made-up plans to apply: layers and recompute by virtual stage, all other figures round."""

from mindspeed_autoparallel.spec.layout import Cluster, Layout
from mindspeed_autoparallel.spec.model import Model, Module
from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.spec.plan_records import ProfileRecord, RankMemory, SearchRecord, StagePlan, StepTime
from mindspeed_autoparallel.units import MIB


def make_plan(layers, recompute=None, model_hash="", virtual_size=1, kind="full", **layout):
    """``layers``: module -> layers per virtual stage."""
    num_stages = len(next(iter(layers.values())))
    pipeline_size = num_stages // virtual_size
    names = list(layers)
    modules = tuple(
        Module(name=name, result_key=name[:3], num_layers=sum(counts), predecessors=tuple(names[:index]))
        for index, (name, counts) in enumerate(layers.items())
    )
    stages = tuple(
        StagePlan(
            stage=stage,
            pipeline_rank=stage % pipeline_size,
            chunk=stage // pipeline_size,
            layers={name: counts[stage] for name, counts in layers.items()},
            first_layer={},
            recompute={name: {kind: counts[stage]} for name, counts in (recompute or {}).items() if counts[stage]},
            forward_us=1.0,
            backward_us=2.0,
        )
        for stage in range(num_stages)
    )
    memory = tuple(
        RankMemory(pipeline_rank=rank, peak_bytes=100 * MIB, limit_bytes=200 * MIB, peak_point="x", terms={})
        for rank in range(pipeline_size)
    )
    placed = Layout(pipeline_size=pipeline_size, virtual_size=virtual_size, **layout)
    return Plan(
        model=Model(name="m", modules=modules, sequence_length=8),
        cluster=Cluster(num_nodes=1, devices_per_node=placed.num_devices),
        layout=placed,
        global_batch_size=8,
        num_microbatches=placed.num_microbatches(8),
        stages=stages,
        memory=memory,
        step=StepTime(total_us=1000.0, pipeline_us=1000.0),
        throughput_tokens_per_s_per_device=1.0,
        baselines=(),
        alternatives=(),
        search=SearchRecord(
            status="optimal", lower_bound_us=1000.0, gap_fraction=0.0, num_configurations=1, num_solved=1, seconds=1.0
        ),
        profile=ProfileRecord(sha256="", source="measured", device="cpu", created_utc="", model_hash=model_hash),
        tool_version="0",
    )


TWO = {"image_encoder": [4, 0], "text_decoder": [1, 3]}


MODEL = {
    "image_encoder": {
        "vision_encoder": {"num_layers": 4, "pipeline_num_layers": [4], "recompute_granularity": "selective"}
    },
    "text_decoder": {"num_layers": 4, "pipeline_num_layers": [4]},
}
