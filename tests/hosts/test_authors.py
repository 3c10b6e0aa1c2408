"""What authors start is read as bash would start it, and made small without a change to their other flags."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked_python import forked_python

HERE = Path(__file__).with_name("authors")
SCRIPT = """\
#!/bin/bash
TP=${TP:-2}
GPUS=$((TP * 2))
ARGS=( --num-layers 12 --hidden-size 1024 --num-attention-heads 16
       --tensor-model-parallel-size $TP --rampup-batch-size "16 16 100" )
[ -n "$EXTRA" ] && ARGS+=(--no-such-flag)
sed -i s/kept/changed/ notes.txt
echo written > $PWD/beside.txt
torchrun --nproc_per_node $GPUS --nnodes=2 pretrain_gpt.py "${ARGS[@]}" \\
    --lr-decay-style cosine 2>&1 | tee train.log
"""
CONFIG = """\
MODEL_ARGS:
  --num-layers: 4
  --swiglu: true
  --untie: false
  --moe-layer-freq: ([0]*3+[1]*5)
  --data-path: ${DATA_PATH}/text
  --seed: ${REPEAT}
  --pipeline-model-parallel-layout: Et\\\\|tL
  --mtp-hybrid-override-pattern: \\"*E\\"
  --sizes: 2 2
TEST_TYPE: regular
"""


@pytest.fixture
def authors(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    import collect
    import shrink

    yield collect, shrink
    for name in ("collect", "shrink", "kept_rows", "table", "train", "multimodal"):
        sys.modules.pop(name, None)


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    case = folder / "tests" / "functional_tests" / "test_cases" / "gpt" / "small"
    case.mkdir(parents=True)
    (case / "model_config.yaml").write_text(CONFIG)
    (folder / "pretrain_gpt.py").write_text("")
    (folder / "notes.txt").write_text("kept")
    (folder / "train.sh").write_text(SCRIPT)
    return folder


def test_scripts_and_configurations_are_read_and_the_checkout_stays_unchanged(authors, checkout):
    collect, _ = authors
    before = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}
    config, script = sorted(collect.trainings(checkout), key=lambda found: found.source, reverse=False)
    assert (config.program, config.num_processes) == ("pretrain_gpt.py", 8)
    assert config.words == (
        *("--num-layers", "4", "--swiglu", "--moe-layer-freq", "([0]*3+[1]*5)", "--data-path", "/data/DATA_PATH/text"),
        *("--seed", "1", "--pipeline-model-parallel-layout", "Et|tL", "--mtp-hybrid-override-pattern", "*E"),
        *("--sizes", "2 2"),
    )
    assert (script.source, script.num_processes) == ("train.sh", 8)
    assert script.words == (
        *("--num-layers", "12", "--hidden-size", "1024", "--num-attention-heads", "16"),
        *("--tensor-model-parallel-size", "2", "--rampup-batch-size", "16 16 100", "--lr-decay-style", "cosine"),
    )
    assert {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["--hybrid-layer-pattern", "--hybrid-override-pattern"])
def test_a_configuration_of_hybrid_layers_that_no_recipe_names_is_one_of_the_hybrid_program(authors, checkout, name):
    """nemotron3_super_release_gb200 ended in GPTModel: its recipe is not in the checkout."""
    collect, _ = authors
    config = next(checkout.rglob("model_config.yaml"))
    config.write_text(CONFIG.replace("  --num-layers: 4\n", f"  --num-layers: 4\n  {name}: M*-E\n"))
    (checkout / "pretrain_hybrid.py").write_text("")
    assert {one.program for one in collect.trainings(checkout) if one.source != "train.sh"} == {"pretrain_hybrid.py"}


def test_a_list_of_machines_that_a_script_reads_has_some(authors, checkout):
    """Without one, scripts of several machines compute a batch of 0."""
    collect, _ = authors
    (checkout / "train.sh").write_text(
        'HOSTFILE="own/hosts.txt"\nNNODES=$(cat $HOSTFILE | wc -l)\nGPUS=8\n'
        "torchrun --nproc_per_node $GPUS --nnodes $NNODES pretrain_gpt.py --num-layers 4 --global-batch-size $((NNODES * GPUS))\n"
    )
    (found,) = [one for one in collect.trainings(checkout) if one.source == "train.sh"]
    assert found.words[-1] == str(found.num_processes) != "0"
    assert not (checkout / "own").exists()


def test_a_launcher_without_quotes_splits_values(authors, checkout):
    """0.12's expands its words unquoted: "2 2" is two sizes there."""
    collect, _ = authors
    utilities = checkout / "tests" / "functional_tests" / "shell_test_utils"
    utilities.mkdir()
    (utilities / "_run_training.sh").write_text("torchrun pretrain_gpt.py $PARAMS")
    config, _ = sorted(collect.trainings(checkout), key=lambda found: found.source)
    assert config.words[-3:] == ("--sizes", "2", "2")


def test_sizes_shrink_and_every_other_flag_stays(authors):
    _, shrink = authors
    words = (
        *("--num-layers", "96", "--pipeline-model-parallel-size", "4", "--num-layers-per-virtual-pipeline-stage", "6"),
        *("--num-experts", "160", "--moe-router-topk", "6", "--moe-router-num-groups", "8", "--bf16", "--swiglu"),
        *("--expert-model-parallel-size", "8", "--global-batch-size", "1024", "--my-own-flag", "a", "b", "--squared"),
        *("--lr-warmup-samples", "0"),
    )
    small = shrink.shrink(words, release="0.20")
    flags = shrink.flags_of(small.words)
    assert flags["--num-layers"] == ["8"], "two chunks of a layer on each of four stages"
    assert int(flags["--num-experts"][0]) % 8 == 0
    assert flags["--my-own-flag"] == ["a", "b"]
    assert {"--squared", "--swiglu"} <= flags.keys()
    assert flags["--lr-warmup-samples"] == ["0"], "beside --train-iters Megatron accepts no other number"
    assert "--bf16" in small.replaced
    assert "--my-own-flag" not in small.replaced
    assert small.num_processes == 32
    assert int(flags["--global-batch-size"][0]) % (small.num_processes // 4) == 0


def test_small_trainings_start(authors):
    """Eight groups share Mamba's heads out, a batch that ramps up grows, and no kernel's part is recomputed."""
    _, shrink = authors
    words = "--hybrid-layer-pattern M-M*-M-M*|M-M-/*M --num-layers 13 --hidden-size 1024 --num-attention-heads 16 "
    words += "--num-experts 8 --moe-grouped-gemm --recompute-modules moe_act layernorm "
    words += "--rampup-batch-size 32 32 9999 --global-batch-size 96 --train-samples 9"
    flags = shrink.flags_of(shrink.shrink(tuple(words.split()), release="0.20").words)
    assert 2 * int(flags["--hidden-size"][0]) // 64 % 8 == 0
    assert flags["--hybrid-layer-pattern"] == ["M-M*|M-/*M"] and flags["--num-layers"] == ["6"]
    assert flags["--recompute-modules"] == ["layernorm"]
    words = "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --num-layers 4 --hidden-size 1024 "
    small = shrink.shrink((*words.split(), "--num-attention-heads", "16"), release="0.16").words
    assert 2 * int(shrink.flags_of(small)["--hidden-size"][0]) // 64 % 8 == 0
    alone = shrink.shrink(("--num-experts", "8", "--recompute-modules", "moe_act"), release="0.20").words
    assert shrink.flags_of(alone)["--recompute-modules"] == ["core_attn"]
    start, step, samples = map(int, flags["--rampup-batch-size"])
    assert int(flags["--global-batch-size"][0]) == start + step > start
    assert int(flags["--train-samples"][0]) == samples + 2 * (start + step), "three iterations"


@pytest.mark.parametrize(("mindspeed", "stays"), [(True, True), (False, False)])
def test_a_kernel_that_mindspeed_checks_for_beside_an_overlap_stays(authors, mindspeed, stays):
    _, shrink = authors
    words = ("--num-layers", "4", "--moe-fb-overlap", "--moe-grouped-gemm", "--moe-permute-fusion", "--bf16")
    small = shrink.shrink(words, release="0.12", mindspeed=mindspeed)
    assert ("--moe-grouped-gemm" in small.words) == ("--bf16" in small.words) == stays
    assert "--moe-permute-fusion" not in small.words
    assert "--moe-grouped-gemm" not in shrink.shrink(words[3:], release="0.12", mindspeed=mindspeed).words


@pytest.mark.parametrize(("mindspeed", "stays"), [(True, True), (False, False)])
def test_a_mamba_of_mindspeed_llm_trains_in_bf16(authors, mindspeed, stays):
    """Its gated norm returns bf16 in every training; the product behind it takes no other type than its weights'."""
    _, shrink = authors
    words = ("--num-layers", "4", "--bf16", "--mamba-chunk-size", "256")
    assert ("--bf16" in shrink.shrink(words, release="0.12", mindspeed=mindspeed).words) == stays
    assert "--bf16" not in shrink.shrink(words[:3], release="0.12", mindspeed=mindspeed).words


@pytest.mark.parametrize("path", ["/work/run-1/a.json", "(/work/run-1/a.json)", "'/work/run-1/a.json'"])
def test_a_kept_line_has_no_folder_of_the_machine(authors, path):
    import kept_rows

    assert kept_rows.short(f"OSError: [Errno 2] no such file: {path}") == "OSError: [Errno N] no such file:"


def test_the_table_counts_trainings_by_whose_losses_they_have(authors, tmp_path):
    import kept_rows
    import table

    stage = {"end": "accepted", "seconds": 0.1, "line": ""}
    stages = dict.fromkeys(("alone", "tuning", "plan", "lean plan"), stage)
    search = {"search": {**stage, "end": "planned"}}
    alone = {"losses": [6.0, 5.0], "steps": 2, "seconds": 1.0, "error": ""}
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table._BEGIN}old\n{table._END}after\n")
    for number, plan in enumerate(
        ({"difference": 2e-7}, {"difference": 3e-4, "native": 0.0}, {"difference": 3e-4, "native": 3e-4}, None)
    ):
        run = {**alone, "layout": "PP2"} | (plan or {"error": "exit code 1", "difference": None})
        trained = {"alone": alone, "plan": run, "lean plan": run}
        row = {"host": "H", "flags": f"{number}", "source": "a.sh", "scripts": 2, "program": "p.py", "devices": 2}
        row |= {"stages": {**stages, **search}, "trained": trained}
        kept_rows.add(tmp_path / "rows.jsonl", kept_rows.compact(row, "c0ffee00"))
    untrained = {name: value for name, value in row.items() if name != "trained"}
    brief = untrained | {"flags": "brief", "stages": {"alone": stage, **search, "plan": stage}}
    shared = row | {
        "flags": "shared",
        "trained": dict.fromkeys(("alone", "plan"), alone | {"as": "0", "difference": 0.0}),
    }
    refused = untrained | {
        "flags": "refused",
        "stages": {"alone": stage, "search": {**stage, "end": "refused", "line": "no"}},
    }
    for more in (brief, shared, refused):
        kept_rows.add(tmp_path / "rows.jsonl", kept_rows.compact(more, "c0ffee00"))
    kept_rows.sort(tmp_path / "rows.jsonl")
    table.write(list(kept_rows.read(tmp_path / "rows.jsonl").values()), [page])
    text = page.read_text()
    assert (
        "| H | 7 (14) | 7 (14) | 6 | 6 (5) | 1 | 0 | 0 | 0.1 s | 0.1 s, at most 0.1 s | 5 of 5 | 2 | 1 | 2 | 2.0e-07 | 12, 2 |"
        in text
    )
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text


def test_native_programs_begin_with_the_patches_taken_back(authors, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(HERE.parent))
    import train

    program = tmp_path / "pretrain.py"
    program.write_text("from __future__ import annotations\n\nimport json\n\nif __name__ == '__main__':\n    main()\n")
    ours, bare = tmp_path / "ours", tmp_path / "bare"
    for folder, undo in ((ours, ""), (bare, train.UNDO)):
        folder.mkdir()
        lines = [line for line in train.script_of(program, folder, undo=undo).read_text().splitlines() if line.strip()]
        compile("\n".join(lines), "copy.py", "exec")
        begin = [
            "from __future__ import annotations",
            "import mindspeed_autoparallel",
            *undo.splitlines(),
            "import json",
        ]
        assert lines[: len(begin)] == begin
        assert lines[len(begin) + 1 :] == ["    import same_start", "    same_start.install()", "    main()"]


def test_a_training_whose_checked_arguments_another_row_has_is_not_repeated(authors, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(HERE.parent))
    import kept_rows
    import train

    given = {"save": "None", "load": "None", "ckpt_format": "torch", "num_layers": "2"}
    key = train.key_of("a.py", 1, given)
    assert train.key_of("a.py", 1, {**given, "ckpt_format": "torch_dist"}) == key, "nothing is saved or loaded"
    saving = {**given, "save": "folder"}
    others = [
        ("b.py", 1, given),
        ("a.py", 2, given),
        ("a.py", 1, {**given, "num_layers": "3"}),
        ("a.py", 1, given, "PP2"),
    ]
    others += [("a.py", 1, saving), ("a.py", 1, {**saving, "ckpt_format": "torch_dist"})]
    assert len({key, *(train.key_of(*other) for other in others)}) == 1 + len(others)

    run = {"losses": [6.0, 5.0], "steps": 2, "seconds": 1.0, "error": "", "exit_code": 0}
    runs: dict = {}
    file = tmp_path / "rows.jsonl"
    for flags in ("first", "second", "third"):
        row = {"host": "H", "flags": flags, "source": "a.sh", "scripts": 1, "program": "a.py", "devices": 2}
        row["stages"] = {"alone": {"end": "accepted", "seconds": 0.1, "line": "", "key": key}}
        ended = {"error": "exit code 1", "exit_code": 1} if flags == "first" else {}
        trained = train._once(runs, row, "alone", lambda ended=ended: run | ended)
        kept_rows.add(file, kept_rows.compact({**row, "trained": {"alone": trained}}, "c0ffee00"))
        runs = train.kept_runs(kept_rows.read(file).values())
    first, second, third = (row["trained"]["alone"] for row in kept_rows.read(file).values())
    assert "error" in first and "as" not in second, "what failed is tried again"
    assert third == {"steps": 2, "as": "second"}
    assert runs[key]["losses"] == [6.0, 5.0], "plans of later rows are compared with them"


def test_one_process_keeps_no_layout_but_sizes_of_one(authors, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE.parent))
    import train

    words = "--swiglu --tensor-model-parallel-size 4 --sequence-parallel --recompute-in-advance --context-parallel-size 2 --lr 1"
    flags = train.flags_of(tuple(words.split()))
    assert train.of_one_process(flags) == ["--swiglu", "--lr", "1", "--tensor-model-parallel-size", "1"]
    staged = {"--hybrid-layer-pattern": ["M-|M*"], "--overlap-param-gather-with-optimizer-step": []}
    assert train.of_one_process(staged) == ["--hybrid-layer-pattern", "M-M*"], "a pattern's stages are a layout, too"
    hierarchy = {"--cp-comm-type": ["a2a+p2p"], "--hierarchical-context-parallel-sizes": ["2", "2"], "--swiglu": []}
    assert train.of_one_process(hierarchy) == ["--swiglu"], "it would assert that these sizes make up one rank"


def test_scripts_of_a_known_family_get_a_tiny_model(authors, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(HERE.parent))
    import multimodal

    monkeypatch.setattr(multimodal.tiny_qwen2vl, "write", lambda folder, checkout, family: written.append(family))
    written, words = [], ("--mm-model", "examples/qwen2.5vl/model_7b.json", "--mm-data", "data.json", "--swiglu")
    small = multimodal.with_tiny_model(words, "pretrain_vlm.py", Path("mm"), tmp_path)
    assert written == ["qwen2.5vl"] and "--swiglu" in small and "data.json" not in small
    for other in ("posttrain_qwen2vl_dpo.py", "pretrain_vlm.py"):
        kept = words if "dpo" in other else ("--mm-model", "examples/internvl3/model.json")
        assert multimodal.with_tiny_model(kept, other, Path("mm"), tmp_path) == kept


def test_layers_of_mindspeed_mm_are_counted_by_its_lists(monkeypatch):
    """Its layer_number counts as if all stages were alike."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(HERE.parent))
    state = SimpleNamespace(get_pipeline_model_parallel_rank=lambda: 1)
    monkeypatch.setitem(sys.modules, "megatron", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(parallel_state=state))
    arguments = SimpleNamespace(noop_layers=None)
    monkeypatch.setitem(sys.modules, "megatron.training", SimpleNamespace(get_args=lambda: arguments))
    import same_start

    layer = SimpleNamespace(layer_number=4, config=SimpleNamespace(pipeline_num_layers=[1, 3]))
    model = SimpleNamespace(get_submodule=lambda place: layer)
    assert same_start._whole_name(model, "decoder.layers.0.weight") == "decoder.layers.2.weight"
    layer.config.pipeline_num_layers, arguments.noop_layers = None, "0,2,5"  # MindSpeed-LLM counts these among all
    assert same_start._whole_name(model, "decoder.layers.0.weight") == "decoder.layers.2.weight"


def test_a_host_does_not_import_from_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(HERE.parent))
    import forked_host

    for more in ("", "/one:/other"):
        folders = forked_host.environment(tmp_path, more)["PYTHONPATH"].split(":")
        assert folders[0] == str(tmp_path) and "" not in folders and set(more.split(":")) - {""} <= set(folders)


def test_mindspeed_is_imported_before_megatron_and_many_trainings_fit(tmp_path):
    """Megatron that was imported in front of the forks made MindSpeed's own patches come too late."""
    program = """import sys

FOUND = "too late" if "megatron.core" in sys.modules else "in time"

if __name__ == "__main__":
    raise ValueError(FOUND)
"""
    (tmp_path / "mindspeed_llm").mkdir()
    (tmp_path / "pretrain_gpt.py").write_text(program)
    core, cases = tmp_path / "megatron" / "core", tmp_path / "tests" / "functional_tests" / "test_cases" / "gpt"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 12\n")
    for number in range(4):  # more than two pipes hold
        (cases / str(number)).mkdir(parents=True)
        long = f"x{number}" * 40000
        (cases / str(number) / "model_config.yaml").write_text(
            f"MODEL_ARGS:\n  --num-layers: {number}\n  --own{number}: {long}\n"
        )
    rows = tmp_path / "rows.jsonl"
    command = [forked_python(), str(HERE / "__main__.py"), str(tmp_path), "--rows", str(rows)]
    subprocess.run(command, check=True, timeout=300)
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    ends = [row["stages"]["alone"] for row in found]
    assert [(end, line) for end, _, line in ends] == [("host", "ValueError: in time")] * 4
    assert [row["flags"] for row in found] == sorted({row["flags"] for row in found})
    before = rows.read_bytes()
    subprocess.run(command, check=True, timeout=300)
    assert rows.read_bytes() == before, "rows that are there are not tried again"
