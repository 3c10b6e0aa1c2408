"""Pages name files, tests, flags of scripts, variables and constants that are there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPT = re.compile(r"python (?:-m )?(tests/[\w./-]+\.py)((?:[^\n`]*\\\n)*[^\n`]*)")
HOSTS = {
    # Files, settings and classes of Megatron, MindSpeed, setuptools and Python.
    *(
        "Megatron-LM/pretrain_gpt.py",
        "megatron/training/arguments.py",
        "pretrain_hybrid.py",
        "pretrain_mamba.py",
        "schedules.py",
    ),
    *("dualpipev_feature", "dualpipev_feature.py", "posttrain_gpt", "posttrain_gpt.py", "op_builder"),
    "finetune_qwen2_5_vl_7b.sh",
    *("mindspeed/op_builder/builder.py", "mindspeed_llm/core/ssm/mamba_mixer.py", "finetune_qwen2_5_vl_7b"),
    *("vlm_model.py", "unaligned_pineline_feature.py", "pipeline_model_parallel_layout_feature.py"),
    *("vlm_model", "unaligned_pineline_feature", "pipeline_model_parallel_layout_feature", "_SOCKET_IFNAME"),
    *("qwen3vl_transformer_block.py", "dsa_indexer_topk_freq", "first_last_layers_bf16"),
    *("apply_query_key_layer_scaling", "qwen3vl_transformer_block", "p2p_communication", "mp_rank_TT_PPP"),
    *("auto_settings", "pretrain_mamba", "pretrain_hybrid", "moss_tts", "qwen3vl_30B_config_v1"),
    *("linear.py", "layernorm_linear.py", "layernorm_linear"),
    *("package_dir", "_CallableGenericAlias"),
    *("mindspeed_mm/models/vision/vision_encoders/qwen2vl_vit_model.py", "mindspeed_mm/models/vlm_model.py"),
    *("qwen2vl_vit_model", "vision_encoders", "gpt3_15b_8t_release"),
    *("llama2_tp2_pp4_vpp2_swap", "llama2_tp2_pp4_vpp2_swap.sh", "mindspeed_llm/training/utils.py"),
    *("ring_context_parallel", "ring_context_parallel.py"),
    # Files and settings of trainers whose starts are on docs/hosts.md.
    *(
        "arguments/arguments_types.py",
        "arguments_types",
        "audio_codes",
        "distributed/torch_parallelize.py",
        "features/memory/recompute.py",
        "finetune_qwen2_5_vl_3b",
        "finetune_qwen2_5_vl_3b.sh",
        "fsdp_turbo",
        "init_device",
        "kimik2_5",
        "modeling_kimi_k25",
        "modeling_step3_vl",
        "modeling_step_vl",
        "modeling_step_vl.py",
        "models/kimi_k3/__init__.py",
        "models/kimik2_5/modeling_kimi_k25.py",
        "models/step3_vl/modeling_step3_vl.py",
        "step3_vl",
        "torch_parallelize",
        "train_fsdp2.py",
        "workers/engine/fsdp/transformer_impl.py",
    ),
}
USERS = {"train.sh", "VLM_ARGS", "DATA_2", "model_hetero_"}
"""What a page's reader has and no checkout of this project: scripts, variables, data, names with a number behind."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def files() -> frozenset[str]:
    """Every file of the checkout, by path and by each end of its path."""
    found = [
        path for part in ("docs", "tests", "patches", "mindspeed_autoparallel") for path in (ROOT / part).rglob("*")
    ]
    paths = [path.relative_to(ROOT).parts for path in (*found, *ROOT.glob("*")) if path.is_file()]
    return frozenset("/".join(parts[start:]) for parts in paths for start in range(len(parts)))


@cache
def words() -> frozenset[str]:
    """Every word of the code, its data and its scripts, and the names of all files."""
    texts = [
        path.read_text("utf-8", errors="replace")
        for part in ("tests", "patches", "mindspeed_autoparallel", "docs")
        for ending in ("py", "sh", "toml", "json", "cpp", "js", "html", "css")
        for path in (*(ROOT / part).rglob(f"*.{ending}"), *ROOT.glob(f"*.{ending}"))
        if path.name != Path(__file__).name
    ]
    stems = {Path(file).stem for file in files()}
    return frozenset(stems.union(*(re.findall(r"\w+", text) for text in texts)))


def missing_from(text: str) -> list[str]:
    """Return the names of a page's text that nothing in the checkout has."""
    missing = {
        file
        for file in re.findall(r"[\w./-]+\.(?:py|sh)\b", text)
        if file.lstrip("./") not in files() and file not in HOSTS | USERS
    }
    for code in re.findall(r"`([^`\n]+)`", text):
        # Names of tests, functions and fields have an underscore, constants and variables are in capitals.
        missing |= {name for name in re.findall(r"\b[A-Za-z]\w*_\w+\b|\b_[A-Z]\w+\b", code) if not is_there(name)}
    for script, rest in SCRIPT.findall(text):
        if (ROOT / script).is_file():
            beside = (ROOT / script).parent.glob("*.py")  # a script may share its words with its neighbours
            known = "".join(path.read_text("utf-8") for path in beside)
            flags = re.findall(r"(?<=\s)--[a-z][\w-]*", rest.split("#")[0])
            missing |= {f"{script} {flag}" for flag in flags if flag not in known}
    return sorted(missing)


def is_there(name: str) -> bool:
    """Return whether the code has the name, or (``-k`` takes parts) tests have it inside a name."""
    return name in words() or name in HOSTS | USERS or name in names_of_tests()


@cache
def names_of_tests() -> str:
    """Every name of a test, a line each."""
    return "\n".join(word for word in words() if word.startswith("test_"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_of_a_page_are_there(page: Path) -> None:
    assert missing_from(page.read_text("utf-8")) == []


def test_names_that_are_not_there_are_found() -> None:
    text = (
        "`tests/unit/test_gone.py` in `tests/unit/test_docs.py`, `_MISSING_S`, `cut_gone`, `test_links_lead_to_files`"
    )
    text += "\n    python tests/helpers/stale_names.py --gone --strict\n"
    assert missing_from(text) == ["_MISSING_S", "cut_gone", "test_gone", "tests/helpers/stale_names.py --gone",
                                  "tests/helpers/stale_names.py --strict", "tests/unit/test_gone.py"]  # fmt: skip


def test_a_constant_has_the_value_that_a_page_gives() -> None:
    """``_NAME`` = 12, ``_NAME`` (12 s): the number is the code's."""
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "mindspeed_autoparallel").rglob("*.py"))
    for page in PAGES:
        for name, value in re.findall(r"`(_?[A-Z][A-Z0-9_]+)` ?(?:=|\(|is) ?([\d.,]*\d)", page.read_text("utf-8")):
            values = re.findall(rf"^{name}(?:: [\w\[\]]+)? = ([\d._]+)", source, re.M)
            assert float(value.replace(",", "")) in [float(one) for one in values], f"{name_of(page)}: {name}"
