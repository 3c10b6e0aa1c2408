"""plan --fsdp2 on computed costs: its output, its files and its refusals."""

import json
from dataclasses import replace

import pytest

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.hosts.opening import ADAPTERS
from mindspeed_autoparallel.planner.sharded.lowering import Lowering
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.planner.sharded.search import search_sharded
from mindspeed_autoparallel.planner.sharded.wrapping import wrappings
from mindspeed_autoparallel.predict.sharded_profile import sharded_profile
from mindspeed_autoparallel.profiles.sharded import Described, LogitBytes
from mindspeed_autoparallel.spec.layout import Cluster
from mindspeed_autoparallel.spec.sharded import GroupChoice, ShardedDecisions, ShardingHost, ShardSizes
from mindspeed_autoparallel.spec.sharded_plan import ShardedPlan

CONFIG = {
    "model_type": "qwen3_vl_moe",
    "text_config": {
        "model_type": "qwen3_vl_moe_text",
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2048,
        "moe_intermediate_size": 512,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    "vision_config": {"depth": 3, "hidden_size": 512, "intermediate_size": 1024, "num_heads": 8},
}
YAML = """
parallel:
  fully_shard_parallel_size: auto
  fsdp_plan:
    apply_modules:
      - model.visual.blocks.{*}
      - model.visual
      - model.language_model.embed_tokens
      - model.language_model.layers.{*}
      - model.language_model
      - lm_head
    param_dtype: bf16
    reduce_dtype: fp32
  expert_parallel_size: 1   # by hand
  ep_plan:
    apply_modules: ["model.language_model.layers.{*}.mlp.experts"]
data: {dataset_param: {basic_parameters: {cutoff_len: 512}}}
model: {model_id: qwen3_vl_moe, model_name_or_path: ./model, freeze: [model.visual]}
features:
  recompute: true
  recompute_plan: {apply_modules: ["model.language_model.layers.{*}"]}
training: {micro_batch_size: 1, gradient_accumulation_steps: 2, train_iters: 1, init_model_with_meta_device: true}
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "config.yaml").write_text(YAML)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def run(files, *more):
    words = ["--fsdp2", str(files / "config.yaml"), "--model", str(files / "config.json"), "--device", "910B"]
    return main(["plan", *words, "--nnodes", "1", "--nproc-per-node", "8", *more])


def test_profile_counts_every_parameter_once():
    profile = sharded_profile(CONFIG, "config.json", Described(sequence=512), find_device("910B"), 8)
    text = CONFIG["text_config"]
    hidden, experts = text["hidden_size"], 3 * text["moe_intermediate_size"] * text["num_experts"]
    layer = hidden * (2 * 16 * 64 + 2 * 4 * 64) + 2 * hidden + hidden * text["num_experts"] + experts * hidden
    decoder = [module for module in profile.modules if "visual" not in module.name]
    counted = sum(sum(profile.kinds[module.kind].parameters) for module in decoder)
    assert counted == 4 * layer + 2 * text["vocab_size"] * hidden + hidden


TEXT = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
TEXT |= {"intermediate_size": 1024, "vocab_size": 1000}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
VISION = {"depth": 2, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4}
AUDIO = {"encoder_layers": 2, "d_model": 256, "encoder_attention_heads": 4, "encoder_ffn_dim": 512}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
LATENT |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "first_k_dense_replace": 1}
MOONVIT = {"vt_num_hidden_layers": 2, "vt_hidden_size": 256, "vt_num_attention_heads": 4, "vt_intermediate_size": 512}
MIMO = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "v_head_dim": 32}
MIMO |= {"hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1], "sliding_window": 128}
THINKER = {"text_config": {"model_type": "qwen3_omni_moe_text", **TEXT, **EXPERTS}, "vision_config": VISION}
THINKER |= {"audio_config": {"model_type": "qwen3_omni_moe_audio_encoder", **AUDIO}}
LISTENER = {"text_config": {"model_type": "qwen3_asr_text", **TEXT}}
LISTENER |= {"audio_config": {"model_type": "qwen3_asr_audio_encoder", **AUDIO}}
STEP = {"layers": 2, "width": 256, "heads": 4, "mlp_ratio": 2.0}
QWEN35 = {"text_config": {"model_type": "qwen3_5_moe_text", **TEXT, **EXPERTS, "linear_num_value_heads": 16}}
FAMILIES = {
    "qwen3_5_moe": (
        {**QWEN35, "vision_config": VISION},
        ("model.visual.blocks.{*}", "model.language_model.layers.{*}.mlp.experts", "lm_head"),
    ),
    "qwen3_omni_moe": (
        {"thinker_config": {**THINKER, "vision_config": {"model_type": "qwen3_omni_moe_vision_encoder", **VISION}}},
        ("visual.blocks.{*}", "audio_tower.layers.{*}", "model.layers.{*}.mlp.experts", "lm_head"),
    ),
    "qwen3_asr": ({"thinker_config": LISTENER}, ("thinker.audio_tower.layers.{*}", "thinker.model.layers.{*}")),
    "kimi_k25": (
        {"text_config": {"model_type": "kimi_k2", **TEXT, **LATENT}, "vision_config": MOONVIT},
        ("vision_tower.encoder.blocks.{*}", "language_model.model.layers.{*}.mlp.experts", "language_model.lm_head"),
    ),
    "mimo_v2": ({**TEXT, **MIMO, "vision_config": VISION}, ("visual.blocks.{*}", "model.layers.{*}.mlp.experts")),
    "step_robotics": (
        {"text_config": {"model_type": "qwen3", **TEXT}, "vision_config": STEP},
        ("model.vision_model.transformer.resblocks.{*}", "model.language_model.layers.{*}", "lm_head"),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_have_the_names_of_the_shipped_files(family):
    config, patterns = FAMILIES[family]
    described = Described(sequence=512, micro_batch_size=3)
    profile = sharded_profile({"model_type": family, **config}, family, described, find_device("910B"), 8)
    assert set(patterns) <= {module.pattern for module in profile.modules}
    layers = [module for module in profile.modules if module.is_layer and module.pattern.endswith("layers.{*}")]
    assert sum("audio" not in module.name for module in layers) == 4
    for module in layers:
        times = [costs.forward_us for costs in profile.kinds[module.kind].costs if costs.at.micro_batch_size == 3]
        assert times and min(times) > 0


def test_tensor_parallel_collectives_of_fsdp2_trainers_are_not_hidden():
    """The share that H100's figures have is of Megatron's kernels; DTensor's collectives run between products."""
    device = find_device("H100")
    whole = {name: replace(one, tensor_exposed=1.0) for name, one in device.efficiencies.items()}
    described = Described(sequence=512, tensor_size=2, sequence_parallel=True)
    found, exposed = (
        sharded_profile({"model_type": "qwen3", **TEXT}, "c", described, one, 8).kinds
        for one in (device, replace(device, efficiencies=whole))
    )
    assert device.efficiency("megatron-core").tensor_exposed < 1 and found == exposed


@pytest.mark.parametrize(("family", "takes_cache"), [("mimo_v2", False), ("qwen3_5_moe", True), ("kimi_k25", True)])
def test_towers_whose_blocks_take_no_cache_are_not_recomputed(family, takes_cache):
    """MindSpeed-MM hands one to every module that it recomputes, and MiMo's vision blocks have no parameter for it."""
    config = FAMILIES[family][0]
    profile = sharded_profile({"model_type": family, **config}, family, Described(sequence=512), find_device("910B"), 8)
    blocks = [module for module in profile.modules if ".blocks." in module.name]
    assert blocks and all(module.is_layer == takes_cache for module in blocks)


KDA = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 8, "head_dim": 64}
KIMI3 = {**TEXT, **EXPERTS, "kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
KIMI3 |= {"v_head_dim": 32, "num_shared_experts": 1, "routed_expert_hidden_size": 256, "attn_res_block_size": 2}
KIMI3 |= {"first_k_dense_replace": 1, "linear_attn_config": KDA, "model_type": "kimi_linear"}
NEMOTRON = {**TEXT, "layers_block_type": ["mamba", "mlp", "attention", "mlp"], "mamba_num_heads": 16}
CODES = {**TEXT, "hidden_size": 256, "vocab_size": 64}
TALKER = {"talker_config": {**TEXT, "text_vocab_size": 5000, "num_code_groups": 4, "code_predictor_config": CODES}}
EARS = {"hidden_size": 128, "num_hidden_layers": 6, "num_timestamp_prediction_layers": 2, "intermediate_size": 256}
ADAPTOR = {"hidden_size": 512, "num_hidden_layers": 2, "intermediate_size": 128}
SPEAKER = {"language_config": TEXT, "n_vq": 4, "audio_vocab_size": 63}
FILM = {"num_attention_heads": 8, "attention_head_dim": 32, "audio_num_attention_heads": 8, "num_layers": 3}
FILM |= {"audio_attention_head_dim": 16, "cross_attention_dim": 256, "audio_cross_attention_dim": 128}
OTHERS = {
    "kimi_k3": (
        {"text_config": KIMI3, "vision_config": {**MOONVIT, "qkv_hidden_size": 512}},
        ("vision_tower.encoder.blocks.{*}", "language_model.model.layers.{*}.block_sparse_moe.experts"),
    ),
    "nemotron_h": (NEMOTRON, ("model.layers.{*}", "lm_head")),
    "fun_asr_nano": (
        {"audio_config": EARS, "adaptor_config": ADAPTOR, "text_config": TEXT, "tie_word_embeddings": True},
        ("llm", "llm.model.embed_tokens", "audio_encoder.tp_encoders.{*}", "audio_adaptor.blocks.{*}"),
    ),
    "qwen3_tts": (TALKER, ("talker.model.layers.{*}", "talker.codec_head", "talker.code_predictor.model.layers.{*}")),
    "moss_tts_delay": (SPEAKER, ("language_model.layers.{*}", "lm_heads")),
    "ltx2": (FILM, ("transformer.patchify_proj", "transformer.transformer_blocks.{*}", "transformer.proj_out")),
}


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_have_the_names_of_the_shipped_files_and_a_plan(family):
    config, patterns = OTHERS[family]
    frozen = ("audio_encoder", "audio_adaptor")
    described = Described(sequence=512, micro_batch_size=2, frozen=frozen)
    profile = sharded_profile({"model_type": family, **config}, family, described, find_device("910B"), 8)
    assert set(patterns) <= {module.pattern for module in profile.modules}
    for module in profile.modules:
        costs = profile.kinds[module.kind].costs
        assert not module.is_layer or min(one.forward_us for one in costs) > 0
        assert module.needs_backward != module.name.startswith(frozen)
        assert module.needs_backward or not any(one.kept_bytes for one in costs)
    choices = dict.fromkeys(module.pattern for module in profile.modules)
    decisions = ShardedDecisions(
        sizes=ShardSizes(num_devices=8, fully_shard_size=8, micro_batch_size=2),
        groups=tuple(GroupChoice(pattern=pattern) for pattern in choices),
    )
    plan = search_sharded(profile, Cluster(num_nodes=1, devices_per_node=8), ShardingHost(name="drawn"), decisions)
    assert plan.step.total_us <= plan.baselines[0].step.total_us


def test_what_a_talkers_root_calls_itself_is_no_part_of_a_unit_inside():
    """The root calls both embeddings and the tables of the code predictor, whose own forward no training calls."""
    profile = sharded_profile(
        {"model_type": "qwen3_tts", **TALKER}, "qwen3_tts", Described(sequence=512), find_device("910B"), 8
    )
    problem = Problem(profile, ShardingHost(name="drawn", lists_units=True), 8)
    shipped = ShardedDecisions(sizes=ShardSizes(num_devices=8, fully_shard_size=8), groups=(GroupChoice(pattern=""),))
    chosen = [{group.pattern for group in one.groups} for one in wrappings(problem, shipped)]
    assert chosen and not any({"talker", "talker.code_predictor"} & units for units in chosen)
    for units in chosen:
        tables = {"talker.model.text_embedding", "talker.model.codec_embedding"}
        assert "talker.model" not in units or tables <= units
    assert any("talker.model" in units for units in chosen)


def _elements(profile, words=""):
    kinds = (profile.kinds[module.kind] for module in profile.modules if module.name.startswith(words))
    return sum(sum(kind.parameters) + sum(kind.frozen_parameters) for kind in kinds)


def test_ltx2_is_as_large_as_its_name_and_holds_sound_that_it_does_not_train():
    silent, loud = (
        sharded_profile(
            {"model_type": "ltx2", "with_audio": sound}, "ltx2", Described(sequence=512), find_device("910B"), 8
        )
        for sound in (False, True)
    )
    assert _elements(silent) == _elements(loud) == pytest.approx(18.9e9, rel=0.005)
    assert silent.head is None and silent.device.runtime_overhead_bytes > find_device("910B").workspace_bytes + 2**30
    trained = sum(sum(silent.kinds[module.kind].parameters) for module in silent.modules)
    assert trained == pytest.approx(13.1e9, rel=0.02)


def test_a_talkers_code_predictor_has_a_row_for_each_code():
    config, _ = OTHERS["qwen3_tts"]
    profile = sharded_profile(
        {"model_type": "qwen3_tts", **config}, "tts", Described(sequence=512), find_device("910B"), 8
    )
    small = profile.kinds["talker.code_predictor.model.layers.{*}"].costs[0]
    assert small.input_bytes == 512 * 4 * 256 * 2
    own, tables = 512 * 256 + 256, 3 * 64 * (512 + 256) + 256
    assert sum(profile.kinds["talker.code_predictor"].parameters) == own + tables


def test_a_tensor_rank_holds_and_computes_its_share_and_waits_for_the_others():
    config = {"model_type": "qwen3", **TEXT, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    config |= {"intermediate_size": 12288, "head_dim": 128}

    def kinds(size, shared=False, divided=False):
        logits = LogitBytes(divided=divided)
        described = Described(sequence=4096, tensor_size=size, sequence_parallel=shared, logits=logits)
        return sharded_profile(config, "c", described, find_device("H100"), 8).kinds

    whole, half, spread = kinds(1), kinds(2), kinds(2, True)
    layer, head = "attention dense", "head"
    norms = 2 * 4096
    assert half[layer].parameters[0] - norms == (whole[layer].parameters[0] - norms) // 2
    assert half[head].parameters[0] == whole[head].parameters[0] // 2
    one, two, three = (kind[layer].costs[0] for kind in (whole, half, spread))
    assert one.forward_us / 2 < two.forward_us < one.forward_us
    assert three.input_bytes == one.input_bytes // 2 == two.input_bytes // 2
    assert three.kept_bytes < two.kept_bytes < one.kept_bytes
    assert half[head].costs[0].kept_bytes == whole[head].costs[0].kept_bytes
    slices = kinds(2, divided=True)[head].costs[0]
    assert slices.kept_bytes == whole[head].costs[0].kept_bytes // 2
    assert slices.forward_us < half[head].costs[0].forward_us


def test_tensor_parallelism_of_experts_is_refused():
    described = Described(sequence=512, tensor_size=2)
    with pytest.raises(ConfigError, match="dense text models"):
        sharded_profile({"model_type": "qwen3_moe", **TEXT, **EXPERTS}, "c", described, find_device("H100"), 8)


def test_a_file_with_tensor_parallelism_is_planned_on_its_groups(files, capsys):
    text = "distributed: {strategy: fsdp2, tp_size: 2}\nstep_scheduler: {local_batch_size: 1, global_batch_size: 8}\n"
    (files / "config.yaml").write_text(f"{text}peft: {{dim: 8}}\n")
    (files / "config.json").write_text(json.dumps({"model_type": "qwen3", **TEXT}))
    assert run(files, "--seq-length", "512", "--out", str(files / "out")) == 0
    plan = ShardedPlan.read(files / "out" / "plan.json")
    assert plan.decisions.sizes.num_devices == 4 and plan.decisions.sizes.global_batch_size == 8
    assert any("tensor parallelism 2 stays" in note for note in plan.profile.notes)
    assert ADAPTERS in plan.profile.notes and ADAPTERS in capsys.readouterr().err
    assert "tp_size: 2" in (files / "out" / "config.yaml").read_text()
    assert run(files, "--seq-length", "512", "--nproc-per-node", "3") == 2
    assert "does not divide --nproc-per-node" in capsys.readouterr().err


def test_eager_attention_keeps_its_matrices():
    config = {"model_type": "qwen3", **TEXT}
    kept = [
        sharded_profile(config, "c", Described(sequence=512, eager=eager), find_device("910B"), 8).kinds[
            "attention dense"
        ]
        for eager in (False, True)
    ]
    fused, eager = (kind.costs[0].kept_bytes for kind in kept)
    statistics = 64 * 512 * 8
    assert eager - fused == 6 * 8 * 512 * 512 - statistics


def test_rows_of_stacked_experts_are_padded_to_the_ranks():
    profile = sharded_profile(CONFIG, "config.json", Described(sequence=512), find_device("910B"), 8)

    def gathered(ranks):
        patterns = dict.fromkeys(module.pattern for module in profile.modules)
        decisions = ShardedDecisions(
            sizes=ShardSizes(num_devices=ranks, fully_shard_size=ranks),
            groups=tuple(GroupChoice(pattern=pattern) for pattern in patterns),
        )
        units = Lowering(Problem(profile, ShardingHost(name="drawn"), 8), decisions).units
        return next(unit.gathered_bytes for unit in units if unit.name.endswith("experts"))

    assert gathered(16) == 2 * 16 * 3 * 512 * 1024 and gathered(32) == 2 * gathered(16)


def test_plan_writes_plan_page_and_the_users_file(files, capsys):
    assert run(files, "--out", str(files / "out")) == 0
    plan = ShardedPlan.read(files / "out" / "plan.json")
    shipped = next(outcome for outcome in plan.baselines if outcome.name == "shipped")
    assert plan.step.total_us <= shipped.step.total_us
    assert plan.decisions.sizes.global_batch_size == 16
    written = (files / "out" / "config.yaml").read_text()
    assert "# by hand" in written and f"expert_parallel_size: {plan.decisions.sizes.expert_size}" in written
    page = (files / "out" / "plan.html").read_text()
    assert plan.decisions.sizes.label() in page and "http" not in page.split("</style>")[1]
    assert "shipped (FS8 MBS1 x2)" in capsys.readouterr().out


def test_files_of_other_trainers_are_planned_and_written_in_their_words(files, capsys):
    (files / "config.yaml").write_text(
        "sharding_size: auto  # all\nsub_modules_to_wrap: ['model.language_model.layers.{*}', lm_head]\n"
        "recompute_modules: ['model.language_model.layers.{*}']\nnum_to_forward_prefetch: 1\nnum_to_backward_prefetch: 1\n"
    )
    more = ("--seq-length", "512", "--global-batch-size", "32")
    assert run(files, *more, "--out", str(files / "out")) == 0
    plan = ShardedPlan.read(files / "out" / "plan.json")
    assert plan.host == "MindSpeed-MM fsdp2_config" and plan.decisions.sizes.global_batch_size == 32
    written = (files / "out" / "config.yaml").read_text()
    assert "# all" in written and "recompute_modules: []" in written
    words = f"--micro-batch-size {plan.decisions.sizes.micro_batch_size}"
    assert (words in capsys.readouterr().err) == (plan.decisions.sizes.micro_batch_size > 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--global-batch-size", "8"], "--global-batch-size has no meaning with --fsdp2"),
        (["--device", "K80"], "K80"),
        (["--model", "missing.json"], "missing.json"),
    ],
)
def test_bad_input_is_one_line(files, capsys, change, words):
    assert run(files, *change) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


@pytest.mark.parametrize(("device", "counted_gib"), [("910B", 60.97), ("H100", 79.11), ("MI300X", 192)])
def test_computed_plans_leave_six_percent_of_what_torch_counts(device, counted_gib):
    profile = sharded_profile(CONFIG, "config.json", Described(sequence=512), find_device(device), 8)
    assert profile.device.memory_capacity_bytes == pytest.approx(0.94 * counted_gib * 2**30, rel=1e-9)


def test_a_memory_margin_reduces_the_limit(files, capsys):
    assert run(files, "--memory-limit-mib", "60000", "--memory-margin", "90") == 0
    assert " of 5.9 GiB" in capsys.readouterr().out
