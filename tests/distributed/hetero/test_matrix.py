"""Random hetero-parallel layouts of the reference model on 8 ranks: every gradient and the norm are one process's.

The short form takes eight of twelve, which have every size, mode and flag that the twelve have.

HETERO_LAYOUTS=200 HETERO_SEED=1 python -m pytest tests/distributed/hetero/test_matrix.py      the long form
HETERO_GENERATOR_STAGES=1 draws only layouts whose generator has a pipeline.
"""

import importlib.util
import json
import os
from pathlib import Path

import pytest
from hetero_layouts import BATCH, WORLD, covering, draw, reference_of
from ranks import run_ranks

_spec = importlib.util.spec_from_file_location("hetero_host", Path(__file__).with_name("test_host.py"))
host = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(host)
pytestmark = [*host.pytestmark[1:], pytest.mark.timeout(7200)]

PROGRAM = Path(__file__).with_name("matrix.py")
COUNT, SEED = int(os.environ.get("HETERO_LAYOUTS", "0")), int(os.environ.get("HETERO_SEED", "0"))
GENERATOR_STAGES = bool(os.environ.get("HETERO_GENERATOR_STAGES"))
A_LAUNCH = 50
"""Cases of one launch: every launch imports Megatron, every case makes process groups."""
BOUNDS = {"fp32": 1e-5, "bf16": 0.1}
WINDOW_WITH_SEQUENCE_PARALLEL_ENCODERS = {
    **draw(0, 1)[0],
    "name": "window-encoders-with-sequence-parallelism",
    "image": {"tp": 2, "pp": 2, "sp": True, "pipeline_num_layers": [2, 2]},
    "audio": {"tp": 4, "sp": True},
    "text": {"tp": 4, "pp": 2, "cp": 1, "pipeline_num_layers": [2, 2]},
    "sequence_parallel": True,
    "memory": "window",
    "scale": 5,
    "micro_batch": 1,
    "dtype": "fp32",
    "data": "mixed",
    "generates": False,
}
"""The backbone's reduction summed these encoders' gradients once more."""


def data_file(folder, kind):
    pictures, tones = (
        json.loads((host.EXAMPLE / "data" / f"{name}.json").read_text()) for name in ("pictures", "tones")
    )
    texts, clips, both = pictures[9:], tones[:3], tones[3]
    records = {
        "mixed": [pictures[0], clips[0], texts[0], pictures[6], both, pictures[1], texts[1], clips[1]],
        "no_images": [*texts, *clips, *clips],
        "no_clips": [*texts, *pictures[3:9]],
        "text": texts * 4,
    }[kind]
    data = json.loads((host.EXAMPLE / "data_audio.json").read_text())
    samples = folder / f"samples-{kind}.json"
    samples.write_text(json.dumps(records))
    data["dataset_param"]["basic_parameters"].update(dataset=str(samples), dataset_dir=str(host.EXAMPLE / "data"))
    file = folder / f"data-{kind}.json"
    file.write_text(json.dumps(data))
    return str(file)


def arguments_of(case, folder):
    """Megatron's flags of a case, after writing its model.json."""
    blocks = {key: case[key] for key in ("image", "audio", "text") if key in case}
    if case["generates"]:
        blocks["generator"] = case.get("generator", {})
    blocks["text"] = {"num_query_groups": 4, **blocks.get("text", {})}
    flags = ["--mm-model", host.model_file(folder, case["name"], blocks), "--mm-data", data_file(folder, case["data"])]
    flags += [
        *host.TRAINING,
        "--train-iters=1",
        f"--micro-batch-size={case['micro_batch']}",
        f"--global-batch-size={BATCH}",
    ]
    flags += [f"--hidden-dropout={case['dropout']}", f"--attention-dropout={case['dropout']}"]
    flags += ["--bf16"] * (case["dtype"] == "bf16") + ["--calculate-per-token-loss"] * case["per_token"]
    if "text" not in case:
        return flags
    flags += ["--hetero-parallel", f"--hetero-memory={case['memory']}", f"--hetero-balance={case['balance']}"]
    flags += [f"--hetero-encoder-mbs-scale={case['scale']}"]
    flags += ["--sequence-parallel"] * case["sequence_parallel"]
    flags += ["--use-distributed-optimizer"] * case["distributed_optimizer"] + ["--overlap-grad-reduce"] * case[
        "overlap"
    ]
    recompute = ["--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"]
    return flags + recompute * case["recompute"]


def run(ranks, cases, folder):
    file = folder / f"cases-{cases[0]['name']}.json"
    file.write_text(json.dumps(cases))
    done = run_ranks(
        ranks,
        PROGRAM,
        folder,
        file,
        python_path=[host.ROOT, host.ROOT / "tests" / "helpers"],
        cwd=host.ROOT,
        timeout_s=3600,
    )
    return done[0].result


def test_every_gradient_is_that_of_one_process(tmp_path):
    plain = host.model_file(tmp_path, "plain", {"text": {"num_query_groups": 4}, "generator": {}})
    weights = str(tmp_path / "weights")
    save = ["--save", weights, "--save-interval=1", "--train-iters=1"]
    host.train(1, "--mm-model", plain, "--mm-data", data_file(tmp_path, "mixed"), *save)
    load = ["--load", weights, "--finetune", "--no-load-optim", "--no-load-rng"]

    def told(case, **more):
        return {**case, **more, "arguments": [*arguments_of(case, tmp_path), *load]}

    drawn = draw(SEED, COUNT or 12, generator_stages=GENERATOR_STAGES)
    cases = [WINDOW_WITH_SEQUENCE_PARALLEL_ENCODERS, *(drawn if COUNT else covering(drawn))]
    references = {reference["name"]: reference for reference in map(reference_of, cases)}
    for name, result in run(1, [told(reference) for reference in references.values()], tmp_path).items():
        assert not result["error"], (name, result)
    wrong, largest = [], dict.fromkeys(BOUNDS, (0.0, ""))
    for first in range(0, len(cases), A_LAUNCH):
        some = [told(case, reference=reference_of(case)["name"]) for case in cases[first : first + A_LAUNCH]]
        results = run(WORLD, some, tmp_path)
        for case in some:
            found, bound = results[case["name"]], BOUNDS[case["dtype"]]
            norm = abs(found["norm"] / found["right_norm"] - 1) if not found["error"] else None
            if found["error"] or found["difference"] > bound or norm > bound:
                wrong.append((case, found))
            else:
                largest[case["dtype"]] = max(largest[case["dtype"]], (found["difference"], case["name"]))
    print(f"\n{len(cases)} layouts, seed {SEED}: largest difference {largest}; wrong: {len(wrong)}")
    assert not wrong, "\n".join(f"{found}\n  {case}" for case, found in wrong)
