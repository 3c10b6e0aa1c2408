"""200 short trainings of random samples under a memory limit, against the bound on running out of memory.

PYTHONPATH=. python tests/benchmarks/data/memory_runs.py FOLDER [runs [limit in MiB]]

The search measures the reference model at the longest text (and once more at a short one); then one process trains runs
of ``STEPS`` steps of samples drawn independently, every storage of the CPU device counted, and the peak of a run says
whether it would have failed under a limit. With a limit given, the same runs train on a device that has it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy

from mindspeed_autoparallel.data.distribution import DataSource, Distribution, make_distribution
from mindspeed_autoparallel.data.work import SampleSize
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.spread.factors import sample_factors
from mindspeed_autoparallel.planner.spread.memory import out_of_memory
from mindspeed_autoparallel.profiles import Profile, read_profile
from mindspeed_autoparallel.spec import Cluster, Layout

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "qwen2vl_tiny"
LONGEST, SHORT, BATCH, STEPS, VOCABULARY = 1024, 128, 2, 2, 512
TRAINING = f"""--micro-batch-size 1 --global-batch-size {BATCH} --num-layers 4 --hidden-size 64 --num-attention-heads 4
--vocab-size {VOCABULARY} --tokenizer-type NullTokenizer --seq-length {LONGEST} --max-position-embeddings {LONGEST}
--make-vocab-size-divisible-by 8 --lr 1e-3 --train-iters 5 --variable-seq-lengths --no-gradient-accumulation-fusion
--eval-interval 1000 --eval-iters 0 --distributed-backend nccl""".split()
Array = Any


def lengths(number: int, seed: int) -> Array:
    """Long-tail texts: median 90 tokens, one in a hundred beyond 700."""
    draw = numpy.random.default_rng(seed)
    return numpy.clip(draw.lognormal(4.5, 0.9, number), 16, LONGEST).astype(int)


def measured(folder: Path, tokens: int) -> Profile:
    """The profile of a search on records whose texts are all cut at ``tokens``."""
    folder.mkdir(parents=True, exist_ok=True)
    turns = [{"role": "user", "content": "x" * tokens}, {"role": "assistant", "content": "y" * 2 * tokens}]
    (folder / "records.json").write_text(json.dumps([{"messages": turns}] * 8))
    data = json.loads((EXAMPLE / "data.json").read_text())
    data["dataset_param"]["basic_parameters"] = {"dataset_dir": str(folder), "dataset": str(folder / "records.json")}
    (folder / "data.json").write_text(json.dumps(data))
    model = json.loads((EXAMPLE / "model.json").read_text())
    model["image_encoder"]["vision_encoder"]["pipeline_num_layers"] = [4]
    model["text_decoder"]["pipeline_num_layers"] = [4]
    (folder / "model.json").write_text(json.dumps(model))
    words = [*TRAINING, "--mm-model", str(folder / "model.json"), "--mm-data", str(folder / "data.json")]
    words[words.index("--seq-length") + 1] = str(tokens)
    words += [
        "--auto-parallel-mm",
        "--nproc-per-node",
        "1",
        "--simulated-nnodes",
        "1",
        "--simulated-nproc-per-node",
        "1",
    ]
    environment = {**os.environ, "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu", "PYTHONPATH": f"{ROOT}:{ROOT}/docs/examples"}
    command = [sys.executable, str(ROOT / "docs/examples/pretrain_vlm.py"), *words]
    command += ["--master-port", os.environ.get("MASTER_PORT", "29873")]
    if (folder / "auto_parallel_work" / "profile.json").exists():
        return read_profile(folder / "auto_parallel_work" / "profile.json")
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return read_profile(folder / "auto_parallel_work" / "profile.json")


class Training:
    """The reference model on one device, trained with microbatches of one text each."""

    def __init__(self) -> None:
        """Build the model and take one step, after which the optimizer has its state."""
        import torch
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.transformer_config import TransformerConfig

        from reference_vlm.configuration import describe_model
        from reference_vlm.model.vlm import VisionLanguageModel, current_chunk
        from reference_vlm.pretrain_vlm import Trainer

        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29874"}
        torch.distributed.init_process_group("gloo")
        values = json.loads((EXAMPLE / "model.json").read_text())
        values["image_encoder"]["vision_encoder"]["pipeline_num_layers"] = [4]
        values["text_decoder"]["pipeline_num_layers"] = [4]
        self.description = describe_model(values, EXAMPLE / "model.json", 1)
        self.trainer = Trainer(self.description)
        parallel_state.initialize_model_parallel(1, 1, get_embedding_ranks=self.trainer.embedding_ranks)
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1)
        init_num_microbatches_calculator(0, None, BATCH, 1, 1)
        base = TransformerConfig(
            num_layers=4,
            hidden_size=64,
            num_attention_heads=4,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
        )
        base.finalize_model_grads_func = finalize_model_grads
        model = VisionLanguageModel(base, self.description, VOCABULARY, current_chunk(0))
        self.model = DistributedDataParallel(config=base, ddp_config=DistributedDataParallelConfig(), module=model)
        self.optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-5), [self.model])
        self.step([SHORT] * BATCH)

    def step(self, tokens: list[int]) -> None:
        """Train one step of a text of so many tokens in every microbatch."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=self.trainer.step,
            data_iterator=(self._batch(number) for number in tokens),
            model=self.model,
            num_microbatches=len(tokens),
            seq_length=LONGEST,
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()

    def _batch(self, tokens: int) -> dict[str, Any]:
        from reference_vlm.data.batches import collate
        from reference_vlm.data.samples import Sample

        ids = [7] * tokens
        positions = numpy.broadcast_to(numpy.arange(tokens), (3, tokens)).copy()
        sample = Sample(name="x", input_ids=ids, labels=ids, positions=positions, patches=(), grids=(), clips=())
        return collate([sample], self.description, 0, tokens)


def peaks_of_runs(number: int, data: Distribution, kept: Path) -> Array:
    """Peaks in bytes of ``number`` runs of samples drawn from ``data``; ``kept``: a line for every run that is done, from
    which an interrupted benchmark goes on."""
    from mindspeed_autoparallel.runtime.devices.cpu.storages import TrackedStorages

    done = [int(line) for line in kept.read_text().split()] if kept.exists() else []
    if len(done) >= number:
        return numpy.array(done[:number])
    training, tokens, shares = Training(), data.sizes()[:, 0], data.shares()
    with TrackedStorages(None, 0.0) as memory, kept.open("a") as lines:
        training.step([SHORT] * BATCH)
        memory.take_peak_bytes()
        for run in range(len(done), number):
            for drawn in numpy.random.default_rng(1000 + run).choice(tokens, (STEPS, BATCH), p=shares).tolist():
                training.step(drawn)
            done.append(memory.take_peak_bytes())
            print(done[-1], file=lines, flush=True)
    return numpy.array(done)


def failures(number: int, data: Distribution, limit_bytes: int, kept: Path) -> Array:
    """Return whether each of ``number`` runs, the same as those of ``peaks_of_runs``, ends on a device of that limit."""
    from mindspeed_autoparallel.runtime.devices.cpu.storages import OutOfMemoryError, TrackedStorages

    done = [int(line) for line in kept.read_text().split()] if kept.exists() else []
    training, tokens, shares = Training(), data.sizes()[:, 0], data.shares()
    with TrackedStorages(limit_bytes, 0.0) as memory, kept.open("a") as lines:
        training.step([SHORT] * BATCH)
        memory.take_peak_bytes()
        for run in range(len(done), number):
            try:
                for drawn in numpy.random.default_rng(1000 + run).choice(tokens, (STEPS, BATCH), p=shares).tolist():
                    training.step(drawn)
                done.append(0)
            except OutOfMemoryError:
                done.append(1)
            print(done[-1], file=lines, flush=True)
    return numpy.array(done, dtype=bool)


def main() -> None:
    """Print one row per limit and profile."""
    folder, number = Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 200
    profiles = {f"{tokens} tokens": measured(folder / str(tokens), tokens) for tokens in (LONGEST, SHORT)}
    source = DataSource(kind="lengths", files=("x",), sha256="", tokens_by="given", num_records=2000, num_read=2000)
    data = make_distribution(source, [SampleSize(tokens=int(one)) for one in lengths(2000, 0)])
    peaks = peaks_of_runs(number, data, folder / "peaks.txt")
    if len(sys.argv) > 3:
        limit = round(float(sys.argv[3]) * 2**20)
        failed = failures(number, data, limit, folder / f"failed_{limit}.txt")
        print(
            f"limit {sys.argv[3]} MiB set: {failed.sum()} of {number} runs failed; other than their peaks say: ", end=""
        )
        print(int((failed != (peaks > limit)).sum()))
        return
    print(f"{number} runs of {STEPS} steps x {BATCH} microbatches; peaks {peaks.min() / 2**20:.2f} to ", end="")
    print(f"{peaks.max() / 2**20:.2f} MiB")
    print("| measured at | limit MiB | certificate: at most | failed runs | share |")
    print("| --- | --- | --- | --- | --- |")
    for name, profile in profiles.items():
        profile = replace(profile, model=replace(profile.model, sequence_length=LONGEST))
        layout = Layout(micro_batch_size=1)
        plan = search(
            profile,
            Cluster(num_nodes=1, devices_per_node=1),
            BATCH,
            SearchOptions(layouts=[layout], with_relaxations=False),
        )
        factors = sample_factors(profile, data)
        worst = out_of_memory(profile, plan, data, factors, STEPS).worst_bytes
        for limit in sorted({*numpy.quantile(peaks, (0.05, 0.5, 0.9, 0.98, 1.0)).astype(int).tolist(), worst}):
            limited = replace(plan, cluster=replace(plan.cluster, memory_limit_bytes=int(limit)))
            bound = out_of_memory(profile, limited, data, factors, STEPS).probability
            failed = int((peaks > limit).sum())
            print(f"| {name} | {limit / 2**20:.2f} | {bound:.2g} | {failed} | {failed / number:.3f} |")


if __name__ == "__main__":
    main()
