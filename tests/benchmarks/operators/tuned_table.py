"""The published table of tuned configurations: does recursive_programming find the same (dp, mp)?

Batch, sequence and microbatches are those of the models' published auto-parallel configuration files; the batch is what
the devices of one stage compute together.
"""

from mindspeed_autoparallel.operators.pipeline import Pipeline, search_pipelined
from mindspeed_autoparallel.operators.presets import preset_graph

ROWS = (  # model, mem_coeff, batch, sequence, stages, microbatches, devices, tuned (dp, mp), published speed-up %
    ("baichuan2-7b", 0.01, 8, 4096, 1, 1, 8, (8, 1), 97.4),
    ("baichuan2-13b", 0.01, 1, 4096, 1, 1, 8, (8, 1), 98.0),
    ("qwen-7b", 4.5, 2, 8192, 1, 1, 8, (2, 4), 96.2),
    ("qwen-14b", 4.5, 2, 8192, 1, 1, 8, (1, 8), 111.3),
    ("llama2-7b", 0.1, 1, 4096, 1, 1, 8, (8, 1), 101.2),
    ("llama2-13b", 0.1, 2, 4096, 1, 1, 8, (8, 1), 99.8),
    ("llama2-70b", 0.1, 1, 4096, 8, 128, 64, (2, 4), 93.5),
)

print("| model | mem_coeff | samples x tokens | tuned dp, mp | found | equal | products that agree | speed-up % |")
for model, coefficient, batch, sequence, stages, micro, devices, tuned, speed_up in ROWS:
    graph = preset_graph(model, batch=batch * micro, sequence=sequence)
    plan = search_pipelined(
        graph, devices, mem_coeff=coefficient, pipeline=Pipeline(stages=stages, servers=1, micro_batch_num=micro)
    )
    found = plan.dp_mp()
    votes = [
        (parts.get("rows", 1), parts.get("columns", 1) * parts.get("inner", 1)) for parts in plan.degrees().values()
    ]
    print(
        f"| {model} | {coefficient} | {batch} x {sequence} | {tuned[0]}, {tuned[1]} | {found[0]}, {found[1]} | "
        f"{'yes' if found == tuned else 'no'} | {votes.count(found)} of {len(votes)} | {speed_up} |"
    )
