"""Plans of ``plan --fsdp2 train.sh`` train real Megatron-LM under ``--use-torch-fsdp2`` as one process trains (docs/fsdp2.md)."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.schedule.sharded import StreamModule, StreamTraining, Unit, replay
from mindspeed_autoparallel.spec.sharded import KEEP, MEGATRON_FSDP, RECOMPUTE


def load(name):
    """Return a module beside this file."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cells, environment = load("megatron_cells"), load("forked_host").environment
SOURCES = [Path(folder) for folder in os.environ.get("MEGATRON_LM_SOURCES", "").split(os.pathsep) if folder]
pytestmark = [
    pytest.mark.timeout(3000),
    pytest.mark.distributed,
    pytest.mark.torch,
    pytest.mark.megatron,
    pytest.mark.skipif(not SOURCES, reason="MEGATRON_LM_SOURCES names no Megatron-LM checkout (tests/hosts/README.md)"),
]
RECOMPUTED = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
SHARDED = ["--use-torch-fsdp2", "--ckpt-format", "torch_dist"]
OWN = [
    *("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params", "--use-distributed-optimizer"),
    *("--ckpt-format", "fsdp_dtensor", "--overlap-grad-reduce", "--overlap-param-gather"),
    "--no-gradient-reduce-div-fusion",
]
PRINTS_NORMS = """
    from megatron.training import training as loop

    make_optimizer = loop.get_megatron_optimizer

    def with_printed_norms(*args, **kwargs):
        optimizer = make_optimizer(*args, **kwargs)
        step = optimizer.step

        def printed(*args, **kwargs):
            result = step(*args, **kwargs)
            print(f"exact norm {float(result[1]):.9g}", flush=True)
            return result

        optimizer.step = printed
        return optimizer

    loop.get_megatron_optimizer = with_printed_norms
"""


def figures(host, world, script, words):
    """Return losses and gradient norms of a training of ``world`` processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    ran = host.run([*launcher, str(script), *words], CUDA_DEVICE_MAX_CONNECTIONS="8")
    assert ran.exit_code == 0, ran.output[-3000:]
    norms = [float(text) for text in re.findall(r"exact norm (\S+)", ran.output)][::world]
    assert len(ran.losses) == len(norms) == 3
    return ran.losses, norms


def planned(shell, folder, world, capsys, *more):
    """Return flags to add and to take out by the plan for ``world`` devices, and the peaks of the script without a plan."""
    command = ["plan", "--fsdp2", str(shell), "--device", "H100", "--nnodes", "1", "--nproc-per-node", str(world)]
    assert main([*command, "--out", str(folder), *more]) == 0
    said = capsys.readouterr()
    added, taken_out = (
        shlex.split(found[1]) if (found := re.search(f"^{line}: (.*)$", said.err, re.MULTILINE)) else []
        for line in ("add to the command line", "remove from it")
    )
    return (
        added,
        taken_out,
        [float(text) for text in re.findall(r"^(?:shipped|without).* peak (\S+) MiB", said.out, re.M)],
    )


def without(words, flags):
    """Return ``words`` without ``flags`` and their values."""
    kept, skips = [], False
    for word in words:
        skips = word in flags or (skips and not word.startswith("--"))
        kept += [] if skips else [word]
    return kept


@pytest.mark.parametrize("source", SOURCES or [None], ids=lambda folder: folder.name if folder else "none")
def test_plans_train_as_one_process_does(source, tmp_path, capsys):
    host = cells.Host(sources=source, folder=tmp_path)
    if host.release < (0, 16):
        pytest.skip("--use-torch-fsdp2 was run from 0.16 on")
    script = host.script("dense")
    script.write_text(script.read_text().replace("same_start.install()\n", f"same_start.install()\n{PRINTS_NORMS}", 1))
    plain = without(host.flags("dense"), ["--use-distributed-optimizer"])
    alone = figures(host, 1, script, plain)
    words = [*plain, *SHARDED, *RECOMPUTED]
    shell = tmp_path / "train.sh"
    shell.write_text(f"torchrun --nproc-per-node 2 pretrain_gpt.py {shlex.join(words)}\n")
    for world, scarce in ((2, False), (4, True)):
        added, taken_out, peaks = planned(shell, tmp_path / "planned", world, capsys)
        if scarce:  # half-way between recomputing all layers and none
            limit = ["--memory-limit-mib", str(sum(peaks) / 2)]
            added, taken_out, _ = planned(shell, tmp_path / "planned", world, capsys, *limit)
            assert added[-2:] == ["--recompute-num-layers", "2"]
        else:
            assert added[:2] == ["--micro-batch-size", "4"]
            assert set(taken_out) == set(RECOMPUTED[::2])
        changed = {*taken_out, *(word for word in added if word.startswith("--"))}
        losses, norms = figures(host, world, script, [*without(words, changed), *added])
        assert losses == pytest.approx(alone[0], rel=1e-6), (world, added, taken_out)
        assert norms == pytest.approx(alone[1], rel=1e-6), (world, added, taken_out)


@pytest.mark.parametrize("source", SOURCES or [None], ids=lambda folder: folder.name if folder else "none")
def test_plans_of_megatron_fsdp_train_as_one_process_does(source, tmp_path, capsys):
    host = cells.Host(sources=source, folder=tmp_path)
    if host.release < (0, 19):
        pytest.skip("--use-megatron-fsdp is planned from 0.19 on")
    script = host.script("dense")
    begin = "    import same_start\n\n    same_start.install()\n"
    script.write_text(script.read_text().replace(begin, PRINTS_NORMS, 1))
    plain = without(host.flags("dense"), ["--use-distributed-optimizer"])
    alone = figures(host, 1, script, plain)
    words = [*plain, *OWN, *RECOMPUTED]
    shell = tmp_path / "train.sh"
    shell.write_text(f"torchrun --nproc-per-node 2 pretrain_gpt.py {shlex.join(words)}\n")
    _, _, peaks = planned(shell, tmp_path / "planned", 2, capsys)
    for limit in ([], ["--memory-limit-mib", str(sum(peaks) / 2)]):
        added, taken_out, _ = planned(shell, tmp_path / "planned", 2, capsys, *limit)
        if limit:  # fewer layers are recomputed than the script has it
            assert added[:6] == [*RECOMPUTED[:3], "block", "--recompute-num-layers", "1"]
        else:
            assert added[:2] == ["--micro-batch-size", "4"]
            assert set(taken_out) == set(RECOMPUTED[::2])
        changed = {*taken_out, *(word for word in added if word.startswith("--"))}
        losses, norms = figures(host, 2, script, [*without(words, changed), *added])
        assert losses == pytest.approx(alone[0], rel=1e-6), (added, taken_out)
        assert norms == pytest.approx(alone[1], rel=1e-6), (added, taken_out)


def megatron_fsdp_step(sizes, unit_size, *, recomputed, outside, accumulation=1):
    """Return what the package's replay does in a step, and its peak, with fp32 buckets of ``sizes`` elements, of which ``outside`` stay.

    Layers are the buckets behind those; ``recomputed``: how many first ones are.
    """
    units = [
        Unit(
            name=str(place),
            reshard_after_forward=place >= outside,
            elements=size,
            gathered_bytes=4 * size,
            reduced_bytes=4 * size,
            gather_ns=5,
            reduce_ns=5,
        )
        for place, size in enumerate(sizes)
    ]
    last, layers = outside - 1, range(outside, len(sizes))

    def module(name, *, unit, **more):
        times = {"forward_ns": 7, "again_ns": 7, "backward_ns": 7, "gradient_bytes": int(unit >= 0)}
        return StreamModule(name=name, parameters_of=unit, **{"parent": 0, **times, **more})

    modules = [
        StreamModule(name="", input_requires_grad=False),
        module("embedding", unit=-1, backward_ns=0, tail_backward_ns=7),
        module("word_embeddings", unit=0, parent=1),
        *(
            module(
                str(unit - outside),
                unit=unit,
                units=(unit,),
                policy=RECOMPUTE if unit - outside < recomputed else KEEP,
                reentrant=True,
            )
            for unit in layers
        ),
        module("final_layernorm", unit=last),
        module("output_layer", unit=last),
    ]
    training = StreamTraining(
        modules=tuple(modules),
        units=tuple(units),
        variant=MEGATRON_FSDP,
        unit_elements=unit_size,
        accumulation=accumulation,
    )
    kinds = {"gather": "G", "wait": "W", "free": "X", "reduce": "R", "wait for reductions": "RW", "A": "F", "BT": "B"}
    found = replay(training, with_spans=True)
    events = [[kinds.get(what[0], what[0]), what[1]] for _, what, *_ in found.spans]
    shown = [one for one in events if one[1] != "word_embeddings"]
    return [[kind, int(name) if kind in "GWXR" else name] for kind, name in shown], found.peak_bytes


@pytest.mark.parametrize("source", SOURCES or [None], ids=lambda folder: folder.name if folder else "none")
def test_megatron_fsdp_trains_on_cpu_and_gathers_in_this_order(source, tmp_path):
    """Two processes, every parameter sharded: the second step's order and its peak against the replay's."""
    if cells.Host(sources=source, folder=tmp_path).release < (0, 19):
        pytest.skip("its order was recorded from 0.19 on")
    program = Path(__file__).with_name("megatron_fsdp_main.py")
    command = [sys.executable, "-W", "ignore", str(program), str(source), str(tmp_path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=2000,
        env=environment(source) | {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    runs = {run["name"]: run for line in done.stdout.splitlines() if line.startswith("{") for run in [json.loads(line)]}
    for name, unit_size, more in (
        ("whole", 10**9, {}),
        ("small", 100_000, {}),
        ("recomputed", 100_000, {"recomputed": 10**9}),
        ("block", 100_000, {"recomputed": 1}),
        ("split", 100_000, {"outside": 2}),
        ("accumulated", 100_000, {"accumulation": 2, "recomputed": 1}),
    ):
        run = runs[name]
        losses = runs["alone accumulated" if name == "accumulated" else "alone"]["losses"]
        assert run["losses"] == pytest.approx(losses, rel=1e-6), name
        step, peak = megatron_fsdp_step(run["buckets"], unit_size, **{"recomputed": 0, "outside": 1, **more})
        assert run["events"] == step, (name, run["buckets"])
        assert run["peak"] == peak, (name, run["buckets"])
