"""Kill a random rank or node of an elastic training on 8 gloo processes again and again, and compare every loss.

    python tests/benchmarks/weights/losses.py FOLDER LOSSES [SEED] [MINUTES] [new]

Four simulated nodes of two processes. A lost node is started again some losses later, so that the training shrinks and
grows. Prints one line a loss: what was killed, ranks afterwards, seconds until the restarted training has made a step,
processor seconds of all processes that ended meanwhile, load of the machine; then how far the losses are from a run of
one process without any, and every plan against its proved optimum. MINUTES: no loss after them. All programs are forked
from one process that has imported torch, Megatron and this project: the seconds leave out what these imports take.
``new``: every program is a new interpreter, as on users' machines; processor seconds are not counted then.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))

from elastic_job import ElasticJob, elastic_job, planned, share_of_optimum, words_of
from forked_python import forked_python, server_seconds

NODES, PER_NODE, START, LIMIT_S = 4, 2, 5, 300
IMPORTED = (
    *("mindspeed_autoparallel", "megatron.training", "megatron.training.argument_utils"),
    *("megatron.core.models.gpt", "megatron.core.datasets.gpt_dataset", "megatron.core.dist_checkpointing"),
    *("mindspeed_autoparallel.runtime.features.elastic.entry", "mindspeed_autoparallel.planner.replan.choose"),
    *(
        "mindspeed_autoparallel.runtime.features.apply_plan.entry",
        "mindspeed_autoparallel.runtime.attention.context_parallel",
    ),
)
STEP_S = 0.4
"""Every step sleeps so long, so that the training does not run away between two losses."""


def main() -> None:
    """Run and print; exit code 1 where a loss differs by more than 1e-6."""
    folder, count = Path(sys.argv[1]).resolve(), int(sys.argv[2])
    generator = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    until = time.monotonic() + 60 * float(sys.argv[4] if len(sys.argv) > 4 else "inf")
    iterations = START + 40 * count
    plan = planned(folder / "plan", nodes=NODES, per_node=PER_NODE)
    _without_losses(folder, plan, iterations, START)
    save, kept = folder / "save", f"iter_{START:07d}"
    shutil.copytree(folder / "whole" / kept, save / kept)
    (save / "latest_checkpointed_iteration.txt").write_text(str(START))
    os.environ["ELASTIC_STEP_S"] = str(STEP_S)
    words = words_of(plan, save, iterations=iterations, interval=2)
    python = sys.executable if sys.argv[5:] == ["new"] else forked_python(IMPORTED)
    with elastic_job(folder / "job", words, per_node=PER_NODE, python=python) as job:
        for node in range(NODES):
            job.start_node(node, NODES)
        job.wait(lambda: _all_take_part(job), LIMIT_S, "start of all nodes")
        _steps_more(job, 1)
        for number in range(count):
            if time.monotonic() > until:
                break
            used, starts = server_seconds(), _starts(job)
            what = _lose(job, generator)
            seconds = job.wait(lambda starts=starts: _starts(job) > starts, LIMIT_S, "restart") + _steps_more(job, 1)
            used, load = server_seconds() - used, os.getloadavg()[0]
            ranks = job.steps()[-1].num_ranks
            print(
                f"{number + 1}: {what}, {ranks} ranks, {seconds:.1f} s, CPU {used:.1f} s, load {load:.0f}", flush=True
            )
            job.wait(lambda: _all_take_part(job), LIMIT_S, "restart with all nodes")
            _steps_more(job, 2)
        steps = job.steps()
    os.environ["ELASTIC_STEP_S"] = "0"
    expected = _without_losses(folder, plan, iterations, max(step.iteration for step in steps))
    worst = max(abs(step.loss / expected[step.iteration] - 1) for step in steps)
    print(f"{len(steps)} steps on {sorted({step.num_ranks for step in steps})} ranks, losses at most {worst:.1e} apart")
    for file in (save / "auto_parallel_elastic").glob("plan-*.json"):
        nodes = int(re.findall(rf"-(\d+)x{PER_NODE}", file.name)[0])
        print(f"plan for {nodes} nodes: {share_of_optimum(plan, file, nodes):.1%} of the proved optimum")
    sys.exit(worst > 1e-6)


def _without_losses(folder: Path, plan: Path, iterations: int, last: int) -> dict[int, float]:
    """Train in one process up to step ``last``, from the checkpoint of an earlier call; the loss of every step since."""
    words = words_of(plan, folder / "whole", iterations=iterations, interval=START)
    words += ["--exit-interval", str(last)]
    with elastic_job(folder / f"reference-{last}", words, per_node=1, python=forked_python(IMPORTED)) as job:
        job.start_node(0, 1)
        job.wait(job.finished, LIMIT_S, "end of the run without losses")
        return {step.iteration: step.loss for step in job.steps()}


def _lose(job: ElasticJob, generator: random.Random) -> str:
    """Kill a rank or a node, or two nodes in a row; start those again that were lost before."""
    trained = sorted(job.agents)
    for node in [node for node in range(NODES) if node not in job.agents]:
        job.start_node(node, NODES)
    kind = generator.choice(("rank", "node", "two nodes"))
    nodes = generator.sample(trained, 2)
    if kind == "rank":
        job.kill_rank(nodes[0], generator.randrange(PER_NODE))
        return f"rank on node {nodes[0]}"
    for node in nodes[: 1 if kind == "node" else 2]:
        job.kill_node(node)
    return f"nodes {nodes}" if kind == "two nodes" else f"node {nodes[0]}"


def _starts(job: ElasticJob) -> int:
    return len(job.lines("a step predicted"))


def _all_take_part(job: ElasticJob) -> bool:
    """Return whether the training has started last with all nodes that there are: others may wait to be let in."""
    starts = job.lines("a step predicted")
    return bool(starts) and f"elastic: {PER_NODE * len(job.agents)} processes" in starts[-1]


def _steps_more(job: ElasticJob, number: int) -> float:
    """Wait for ``number`` steps more; the seconds."""
    before = len(job.steps())
    return job.wait(lambda: len(job.steps()) >= before + number, LIMIT_S, "next step")


if __name__ == "__main__":
    main()
