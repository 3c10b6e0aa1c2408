"""Peak memory of Megatron's own FSDP on two CPU processes beside the cost model (formulas F1-F3).

    pip install einops
    python tests/benchmarks/auto_tuning/fsdp_memory.py

A small GPT trains three steps with the distributed optimizer, ZeRO-2 and ZeRO-3; live bytes of the third are counted.
Activations are the same in all three, so the model is asked for what the peaks differ by: state, parameters gathered
and gradients waiting where the peak is, the head's backward.
"""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

from mindspeed_autoparallel.cost.memory import PlacedBlock, static_terms
from mindspeed_autoparallel.cost.sharding import gathered_bytes, waiting_bytes
from mindspeed_autoparallel.profiles import BlockCost, RecomputeCost, StateBytes
from mindspeed_autoparallel.spec import Layout, Sharding

HERE = Path(__file__)
SCRIPT = HERE.parents[3] / "docs" / "examples" / "pretrain_gpt.py"
LAYERS, HIDDEN, FFN, VOCABULARY, UNIT = 4, 64, 160, 512, 94464
ARGUMENTS = f"""--use-mcore-models --num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN}
    --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 4 --global-batch-size 8
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 8 --lr 1e-3 --train-iters 3
    --eval-interval 1000 --eval-iters 0 --transformer-impl local --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion --num-workers 0 --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --bf16 --mock-data
    --use-distributed-optimizer --log-interval 1""".split()
FSDP = f"""--use-megatron-fsdp --ckpt-format fsdp_dtensor --megatron-fsdp-main-grads-dtype fp32
    --suggested-communication-unit-size {UNIT} --no-gradient-reduce-div-fusion""".split()
"""The last because gloo cannot scale what it reduces."""


def train() -> None:
    """One process: prints the peak of the third step and the losses."""
    from megatron.training import training

    from mindspeed_autoparallel.runtime.devices.cpu.storages import TrackedStorages

    step, number = training.train_step, 0

    def counted(*args, **kwargs):
        nonlocal number
        number += 1
        if number < 3:
            return step(*args, **kwargs)
        with TrackedStorages() as live:
            result = step(*args, **kwargs)
        print(f"PEAK {live.take_peak_bytes()}", flush=True)
        return result

    training.train_step = counted
    sys.argv[0] = str(SCRIPT)
    runpy.run_path(str(SCRIPT), run_name="__main__")


def measured(strategy: str) -> tuple[int, list[str]]:
    """Highest peak of the two ranks, and every loss."""
    words = [*FSDP, "--data-parallel-sharding-strategy", strategy] if strategy else []
    variables = {"MINDSPEED_AUTOPARALLEL_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(HERE)]
    done = subprocess.run(
        [*command, *ARGUMENTS, *words], env={**os.environ, **variables}, capture_output=True, text=True, timeout=300
    )
    peaks = [int(peak) for peak in re.findall(r"PEAK (\d+)", done.stdout)]
    if not peaks:
        sys.exit(done.stderr[-2000:])
    return max(peaks), re.findall(r"lm loss: (\S+)", done.stdout)


def modelled(strategy: str) -> int:
    """Bytes of state, and of what is whole for a while, in the head's backward."""

    def block(name: str, number: int) -> PlacedBlock:
        state = StateBytes(
            num_parameters=number, parameter_bytes=2 * number, gradient_bytes=4 * number, optimizer_bytes=12 * number
        )
        cost = BlockCost(forward_us=0, backward_us=0, recompute={"none": RecomputeCost(saved_bytes=0)}, dense=state)
        return PlacedBlock(name=f"text {name}", cost=cost)

    layer = HIDDEN * (4 * HIDDEN + 3 * FFN + 2)
    table = HIDDEN * VOCABULARY
    blocks = [block("pre", table), *(block(f"layer {n}", layer) for n in range(LAYERS)), block("post", table + HIDDEN)]
    if not strategy:
        return sum(static_terms(blocks, Layout(data_size=2)).values())
    sharding = Sharding(parameters=strategy == "optim_grads_params", communication_unit=UNIT)
    state = sum(static_terms(blocks, Layout(data_size=2, sharding=sharding)).values())
    return state + gathered_bytes(blocks, sharding)["B"][-1] + waiting_bytes(blocks, sharding)[-1]


def main() -> None:
    base, losses = measured("")
    print(f"ZeRO-1: peak {base} bytes, losses {' '.join(losses)}")
    for strategy in sys.argv[1:] or ("optim_grads", "optim_grads_params"):
        peak, found = measured(strategy)
        saved, wanted = base - peak, modelled("") - modelled(strategy)
        print(
            f"{strategy}: peak {peak} bytes, losses {'equal' if found == losses else ' '.join(found)}; below ZeRO-1 by "
            f"{saved}, modelled {wanted}; error of the peak {(base - wanted) / peak - 1:+.2%}"
        )


if __name__ == "__main__":
    train() if "RANK" in os.environ else main()
