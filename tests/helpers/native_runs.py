"""Start the hand-written native FSDP2 host (tests/hosts/small_native) on one or several processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from forked_python import forked_python

from mindspeed_autoparallel.runtime.launch.ports import reserved_port
from mindspeed_autoparallel.spec.layout import Cluster
from mindspeed_autoparallel.spec.plan_records import ProfileRecord
from mindspeed_autoparallel.spec.sharded import ShardedDecisions
from mindspeed_autoparallel.spec.sharded_plan import ShardedMemory, ShardedPlan, ShardedSearch, ShardedStep

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "tests" / "hosts" / "small_native"
SCRIPT = SMALL / "mindspeed_mm" / "fsdp" / "train" / "trainer.py"
PLUGIN = "mindspeed_autoparallel.plugin"
IN_FRONT = f"import mindspeed_autoparallel, runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
"""What a line on top of the script does."""

TEXT = """# tiny, for tests
parallel:
  fully_shard_parallel_size: auto
  fsdp_plan:
    apply_modules:
      - model.embed_tokens
      - model.layers.{*}
      - lm_head
model:
  model_id: tiny
  model_name_or_path: MODEL
data: {samples: 64}
features:
  recompute: true  # every layer
  recompute_plan:
    apply_modules: ["model.layers.{*}"]
training:
  micro_batch_size: 1
  gradient_accumulation_steps: 1
  plugin: [PLUGINS]
"""

FOLLOW = """import os
from pathlib import Path
import torch
from mindspeed_autoparallel.runtime.features.preflight.ranks import PreflightTask
from mindspeed_autoparallel.runtime.features.preflight.watch import watching
from mindspeed_autoparallel.runtime.fsdp2.apply import read_plan, set_plan
from mindspeed_autoparallel.runtime.fsdp2.rank_alone import _Steps
from mindspeed_autoparallel.runtime.fsdp2.trainer import running_trainer
from mindspeed_autoparallel.runtime.profiling import balanced_routing

# Every rank sends its tokens alike, as a rank that is alone has it: an imbalance is for the first rank's experts.
size = int(os.environ.get("EXPERT_RANKS", "1"))
balanced_routing._own_native_experts = lambda num_experts: (0, num_experts // size)
balanced_routing.balance_routing(float(os.environ.get("IMBALANCE", "1")))
native, rank, watch = running_trainer(), int(os.environ["RANK"]), watching()
if Path("plan.json").exists():
    set_plan(native, read_plan(native, Path("plan.json")), Path("plan.json"))
watch.task = PreflightTask(rank=rank, world_size=int(os.environ["WORLD_SIZE"]), plan="", num_steps=3, imbalance=1.0, switches=(),
                           result=f"real{rank}.json")
leave = watch.leave
watch.leave = lambda *words: (torch.distributed.barrier(), leave(*words))
_Steps(watch).attach(native.module.TrainEngine)
"""
"""A plugin that follows a real rank in the way in which a pre-flight follows a rank that is alone."""


@dataclass(frozen=True)
class Finished:
    """How a launch ended: the worst exit status, and each rank's output with its errors."""

    status: int
    outputs: tuple[str, ...]

    @property
    def losses(self) -> list[tuple[float, float]]:
        """Return loss and gradient norm of each step."""
        found = re.findall(r"loss: (\S+) \| grad norm: (\S+) \|", self.outputs[0])
        return [(float(loss), float(norm)) for loss, norm in found]


def native_file(folder: Path, plugins: str = PLUGIN, **edits: str) -> Path:
    """Write the configuration and the model's folder; ``edits`` replace text."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4}
    (model / "config.json").write_text(json.dumps(sizes))
    text = TEXT.replace("MODEL", str(model)).replace("PLUGINS", plugins)
    for old, new in edits.items():
        assert old in text
        text = text.replace(old, new)
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def run_native(size: int, config: Path, *words: str, command: tuple[str, ...] = (str(SCRIPT),)) -> Finished:
    """Run the trainer on ``size`` processes with ``words`` behind the YAML."""
    with reserved_port() as port:
        running = []
        for rank in range(size):
            path = os.pathsep.join([str(SMALL), str(ROOT), os.environ.get("PYTHONPATH", "")])
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "NON_MEGATRON": "true", "PYTHONPATH": path}
            variables |= {"OMP_NUM_THREADS": 1, "TOKENIZERS_PARALLELISM": "false"}
            running.append(
                subprocess.Popen(
                    [forked_python(), "-W", "ignore", *command, str(config), *words],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    cwd=config.parent,
                    env={**os.environ, **{key: str(value) for key, value in variables.items()}},
                )
            )
        outputs = tuple(process.communicate(timeout=300)[0] for process in running)
    return Finished(max(abs(process.returncode) for process in running), outputs)


def plan_of(decisions: ShardedDecisions, model: str = "tiny") -> ShardedPlan:
    """Return a plan as a search writes it, with made-up figures."""
    step = ShardedStep(
        total_us=5000.0,
        compute_us=4000.0,
        recompute_us=0.0,
        exchange_us=0.0,
        gather_us=500.0,
        reduce_us=500.0,
        host_copy_us=0.0,
        exposed_us=0.0,
        optimizer_us=100.0,
    )
    return ShardedPlan(
        model=model,
        cluster=Cluster(num_nodes=1, devices_per_node=decisions.sizes.num_devices, memory_limit_bytes=2**30),
        host="mindspeed-mm",
        decisions=decisions,
        step=step,
        memory=ShardedMemory(peak_bytes=2**20, limit_bytes=2**30, peak_point="", terms={}),
        tokens_per_s_per_device=1.0,
        baselines=(),
        alternatives=(),
        search=ShardedSearch(
            status="optimal", lower_bound_us=5000.0, gap_fraction=0.0, num_sizes=1, num_solved=1, seconds=0.1
        ),
        profile=ProfileRecord(sha256="", source="measured", device="cpu", created_utc="", model_hash=""),
        tool_version="0.1.0",
    )
