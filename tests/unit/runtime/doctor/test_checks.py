"""Every check on a made-up node: its findings without and with a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_autoparallel.hosts.script import Script, parse_script, read_script
from mindspeed_autoparallel.patching.patch import Patch
from mindspeed_autoparallel.runtime.doctor import examine as examining
from mindspeed_autoparallel.runtime.doctor import launch, machine, settings
from mindspeed_autoparallel.runtime.doctor.examine import CHECKS, examine
from mindspeed_autoparallel.runtime.doctor.finding import (
    ADVICE,
    OK,
    PROBLEM,
    UNKNOWN,
    Finding,
    as_json,
    as_text,
    export_lines,
)
from mindspeed_autoparallel.runtime.doctor.node import ASCEND, NVIDIA, Node
from mindspeed_autoparallel.units import GIB

Make = Callable[..., Node]


@pytest.fixture
def node_with(tmp_path: Path) -> Make:
    def make(kind: str = ASCEND, count: int = 2, files: dict[str, str] | None = None, **fields: Any) -> Node:
        names = {ASCEND: "davinci", NVIDIA: "nvidia"}
        made = {f"dev/{names[kind]}{index}": "" for index in range(count)} if kind in names else {}
        for name, text in {**made, **(files or {})}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return Node(root=tmp_path, **fields)

    return make


def statuses(found: Iterable[Finding]) -> list[str]:
    return [finding.status for finding in found]


def only(found: Iterable[Finding]) -> Finding:
    (finding,) = found
    return finding


def test_a_machine_without_a_device_gets_the_note_that_planning_works(node_with: Make) -> None:
    assert "planning does not" in only(machine.check_device(node_with("none"))).why


def test_driver_of_an_ascend_node_is_named(node_with: Make) -> None:
    node = node_with(files={"usr/local/Ascend/driver/version.info": "Version=24.1.rc3\nascendhal_version=7"})
    assert only(machine.check_device(node)).what == "2 Ascend NPU(s), driver 24.1.rc3"


def test_more_processes_than_devices_is_a_problem(node_with: Make) -> None:
    node = node_with(script=Script(flags={"--nproc-per-node": "8"}))
    assert only(machine.check_processes_against_devices(node)).remedy == "--nproc-per-node 2"
    fewer = replace(node, script=Script(flags={"--nproc-per-node": "1"}))
    assert statuses(machine.check_processes_against_devices(fewer)) == [ADVICE]
    assert statuses(machine.check_processes_against_devices(replace(node, script=Script()))) == []


@pytest.mark.parametrize(
    ("check", "environment", "name", "value"),
    [
        (settings.check_task_queue, {}, "TASK_QUEUE_ENABLE", "2"),
        (settings.check_combined, {}, "COMBINED_ENABLE", "1"),
        (settings.check_memory_reuse, {}, "MULTI_STREAM_MEMORY_REUSE", "2"),
        (settings.check_caches, {"HOST_CACHE_CAPACITY": "9"}, "ACLNN_CACHE_LIMIT", "100000"),
        (settings.check_launch_blocking, {"ASCEND_LAUNCH_BLOCKING": "1"}, "ASCEND_LAUNCH_BLOCKING", "0"),
        (settings.check_allocator, {}, "PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True"),
        (settings.check_connect_timeout, {"HCCL_CONNECT_TIMEOUT": "120"}, "HCCL_CONNECT_TIMEOUT", "1200"),
        (settings.check_debug_output, {"ASCEND_GLOBAL_LOG_LEVEL": "0"}, "ASCEND_GLOBAL_LOG_LEVEL", "3"),
    ],
)
def test_the_variable_that_a_check_proposes_satisfies_it(
    node_with: Make, check: Any, environment: dict[str, str], name: str, value: str
) -> None:
    finding = only(check(node_with(environment=environment)))
    assert finding.status == ADVICE
    assert finding.why
    assert finding.exports == {name: value}
    assert set(statuses(check(node_with(environment={**environment, **finding.exports})))) <= {OK}


def test_other_allocator_options_are_kept(node_with: Make) -> None:
    node = node_with(NVIDIA, environment={"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8"})
    wanted = {"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8,expandable_segments:True"}
    assert only(settings.check_allocator(node)).exports == wanted


def test_the_scripts_exports_count_as_environment(node_with: Make) -> None:
    script = parse_script("export TASK_QUEUE_ENABLE=2\npython train.py")
    assert statuses(settings.check_task_queue(node_with(script=script))) == [OK]


def test_order_of_kernels_matters_only_with_tensor_parallelism(node_with: Make) -> None:
    assert only(settings.check_max_connections(node_with(NVIDIA))).status == ADVICE
    cut = node_with(NVIDIA, script=Script(flags={"--tensor-model-parallel-size": "2"}))
    assert only(settings.check_max_connections(cut)).status == PROBLEM


NUMA = {
    "sys/devices/system/node/node0/cpulist": "0-3",
    "sys/devices/system/node/node1/cpulist": "4-7",
    "sys/bus/pci/devices/a/class": "0x120000",
    "sys/bus/pci/devices/a/vendor": "0x19e5",
    "sys/bus/pci/devices/a/numa_node": "0",
    "sys/bus/pci/devices/b/class": "0x120000",
    "sys/bus/pci/devices/b/vendor": "0x19e5",
    "sys/bus/pci/devices/b/numa_node": "1",
}


@pytest.mark.parametrize(
    ("value", "status", "said"),
    [
        (None, ADVICE, "2 NUMA node(s), 8 cores"),
        ("0", ADVICE, "is off"),
        ("2", OK, ""),
        ("1,npu0:0-3,npu1:4-7", OK, ""),
        ("1,npu0:4-7", ADVICE, "NUMA node 0, its cores are on another"),
        ("1,npu0:0-2,npu1:2-2", ADVICE, "share cores"),
        ("1,npu0:0-63", PROBLEM, "this node has 8"),
        ("2,npu0:0-3", ADVICE, "mode 2"),
        ("7", PROBLEM, "mode '7'"),
        ("1,npu0=3", PROBLEM, "npu<i>:<first>-<last>"),
        ("1,npu0:3-1", PROBLEM, "npu<i>:<first>-<last>"),
    ],
)
def test_core_binding(node_with: Make, value: str | None, status: str, said: str) -> None:
    environment = {} if value is None else {"CPU_AFFINITY_CONF": value}
    found = list(machine.check_affinity(node_with(files=NUMA, environment=environment)))
    assert any(finding.status == status and said in finding.what for finding in found), found


def test_core_lists_of_the_kernel_are_understood() -> None:
    assert machine.parse_cores("0-2,8") == {0, 1, 2, 8}
    with pytest.raises(ValueError, match="invalid"):
        machine.parse_cores("all")


def test_torch_npu_of_another_torch_is_a_problem(node_with: Make) -> None:
    have = {"torch": "2.4.0", "torch-npu": "2.1.0", "megatron-core": "0.12.1"}
    found = list(examining.check_releases(node_with(release_of=lambda name: have.get(name, ""))))
    assert [finding.what for finding in found if finding.status == PROBLEM] == ["torch 2.4.0 with torch_npu 2.1.0"]
    have["torch-npu"] = "2.4.0.post2"
    found = list(examining.check_releases(node_with(release_of=lambda name: have.get(name, ""))))
    assert statuses(found) == [OK]


def test_patch_tables_outside_their_range_are_named(node_with: Make) -> None:
    patch = Patch(
        target="megatron.core:f",
        wrapper=lambda wrapped, instance, args, kwargs: None,
        why="",
        versions=">=0.12,<0.13",
        flags=("--auto-parallel-mm",),
    )
    newer = node_with(release_of=lambda name: "0.19.2")
    assert "--auto-parallel-mm" in only(examining.check_patches(newer, [patch])).why
    assert statuses(examining.check_patches(node_with(release_of=lambda name: "0.12.1"), [patch])) == [OK]


def test_a_named_interface_must_exist(node_with: Make) -> None:
    node = node_with(files={"sys/class/net/eth0": ""}, environment={"HCCL_SOCKET_IFNAME": "bond0"})
    assert only(settings.check_interface(node)).status == PROBLEM
    assert statuses(settings.check_interface(replace(node, environment={"HCCL_SOCKET_IFNAME": "=eth0"}))) == []


def test_localhost_as_master_of_several_nodes_is_a_problem(node_with: Make) -> None:
    script = Script(flags={"--nnodes": "2", "--master-addr": "localhost"})
    assert statuses(settings.check_master(node_with(script=script))) == [PROBLEM]


@pytest.mark.parametrize(
    ("port", "free", "status"), [("6000", True, OK), ("6000", False, PROBLEM), ("x", True, PROBLEM)]
)
def test_master_port(node_with: Make, port: str, free: bool, status: str) -> None:
    node = node_with(environment={"MASTER_PORT": port}, port_is_free=lambda number: free)
    assert statuses(settings.check_master(node)) == [status]
    elsewhere = replace(node, environment={"MASTER_PORT": "6000", "NODE_RANK": "1"}, port_is_free=lambda number: False)
    assert statuses(settings.check_master(elsewhere)) == []


@pytest.mark.parametrize(("told", "status"), [("1000.2", OK), ("1005.0", PROBLEM), (None, UNKNOWN)])
def test_clock_of_another_node(node_with: Make, told: str | None, status: str) -> None:
    node = node_with(peers=("b",), now_s=lambda: 1000.0, run=lambda words: told if words[0] == "ssh" else None)
    assert statuses(settings.check_clock(node)) == [status]


def test_a_slow_answer_is_not_taken_for_a_wrong_clock(node_with: Make) -> None:
    times = iter([1000.0, 1006.0])
    node = node_with(peers=("b",), now_s=lambda: next(times), run=lambda words: "1006.0" if words[0] == "ssh" else None)
    assert statuses(settings.check_clock(node)) == [OK]


def test_shared_memory_is_counted_per_process(node_with: Make) -> None:
    node = node_with(count=8, free_bytes=lambda path: 4 * GIB)
    assert "--shm-size=8g" in only(machine.check_shared_memory(node)).remedy
    assert statuses(machine.check_shared_memory(replace(node, free_bytes=lambda path: 9 * GIB))) == [OK]


def test_disk_is_looked_at_where_the_script_saves(node_with: Make) -> None:
    seen = []
    node = node_with(script=Script(flags={"--save": "there"}), free_bytes=lambda path: seen.append(path) or GIB)
    assert statuses(machine.check_disk(node)) == [ADVICE]
    assert seen == [Path("there")]


def test_open_file_limit(node_with: Make) -> None:
    files = {"proc/self/limits": "Max open files            1024                 4096                 files"}
    assert "1024" in only(machine.check_open_files(node_with(files=files))).what


SIZES = {"--nproc-per-node": "8", "--tensor-model-parallel-size": "2", "--pipeline-model-parallel-size": "2"}


def test_sizes_of_the_script_must_divide(node_with: Make) -> None:
    assert statuses(launch.check_world_size(node_with(script=Script(flags=SIZES)))) == [OK]
    odd = Script(flags={**SIZES, "--tensor-model-parallel-size": "3"})
    assert "TP 3 x PP 2 x CP 1 = 6 on 8" in only(launch.check_world_size(node_with(script=odd))).what
    batch = Script(flags={**SIZES, "--global-batch-size": "7", "--micro-batch-size": "2"})
    assert only(launch.check_world_size(node_with(script=batch))).remedy == "--global-batch-size 8"
    unreadable = Script(flags={**SIZES, "--tensor-model-parallel-size": "$(nproc)"})
    assert statuses(launch.check_world_size(node_with(script=unreadable))) == [UNKNOWN]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", "2 times"),
        ("--tensor-model-parallel-size 2", ""),
        ("--sequence-parallel", ""),
    ],
)
def test_gradients_that_mindspeed_mm_sums_are_named(node_with: Make, flags: str, said: str) -> None:
    script = parse_script(f"torchrun --nproc_per_node 2 pretrain_vlm.py --mm-model model.json {flags}")
    found = list(launch.check_encoder_gradients(node_with(script=script)))
    assert statuses(found) == [ADVICE] * bool(said) and all(said in finding.why for finding in found)


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("--context-parallel-size 4 --context-parallel-algo megatron_cp_algo --attention-mask-type general", 1),
        ("--context-parallel-size 4 --context-parallel-algo ulysses_cp_algo --attention-mask-type general", 0),
        ("--context-parallel-size 4 --context-parallel-algo megatron_cp_algo", 0),
        ("--context-parallel-size 1 --context-parallel-algo megatron_cp_algo --attention-mask-type general", 0),
    ],
)
def test_a_general_mask_that_ring_attention_drops_is_named(node_with: Make, flags: str, count: int) -> None:
    """Qwen3's own test of it in MindSpeed-LLM: a loss of 11.95593 under CP4, 11.95117 with the mask and on one process."""
    script = parse_script(f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags}")
    assert statuses(launch.check_ring_mask(node_with(script=script))) == [ADVICE] * count


@pytest.mark.parametrize("switch", ["--auto-parallel-mm", "--auto-tuning", "--auto-parallel-preflight"])
def test_a_feature_with_processes_of_its_own_under_torchrun_is_a_problem(node_with: Make, switch: str) -> None:
    script = parse_script(f"torchrun --nproc-per-node 8 train.py {switch}")
    assert statuses(launch.check_search_launcher(node_with(script=script))) == [PROBLEM]
    script = parse_script(f"python train.py {switch}")
    assert statuses(launch.check_search_launcher(node_with(script=script))) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--nproc_per_node 16 train_fsdp2.py a.yaml --parallel.fsdp_size 16", [OK]),
        ("--nproc_per_node 16 ./train_fsdp2.py a.yaml", [OK]),
        ("--nproc_per_node 16 train_fsdp2.py a.yaml --parallel.fsdp_size 12", [PROBLEM]),
        ("--nproc_per_node 8 train_fsdp2.py a.yaml --parallel.fsdp_size 8 --auto-parallel-mm", [PROBLEM, OK]),
        ("--nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2", []),
    ],
)
def test_the_fsdp2_trainer_of_mindspeed_llm_is_recognised(node_with: Make, words: str, expected: list[str]) -> None:
    assert statuses(launch.check_fsdp2_trainer(node_with(script=parse_script(f"torchrun {words}")))) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--use-torch-fsdp2 --untie-embeddings-and-output-weights", [OK]),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce "
            "--overlap-param-gather --untie-embeddings-and-output-weights --position-embedding-type rope",
            [OK],
        ),
        ("--use-megatron-fsdp", [ADVICE]),
        ("--use-torch-fsdp2", [ADVICE]),
        ("--use-torch-fsdp2 --untie-embeddings-and-output-weights --auto-parallel-mm", [PROBLEM, OK]),
        ("--use-custom-fsdp", [ADVICE]),
        ("--tensor-model-parallel-size 2", []),
    ],
)
def test_parameters_that_megatron_shards_are_recognised(
    node_with: Make, tmp_path: Path, words: str, expected: list[str]
) -> None:
    file = tmp_path / "train.sh"
    file.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py --vocab-size 1000 --seq-length 64 {words}")
    script = read_script(file)
    file.unlink()  # it was read: the check needs no second look
    assert statuses(launch.check_sharded_parameters(node_with(script=script))) == expected


def test_every_check_runs_on_a_bare_machine(tmp_path: Path) -> None:
    node = Node(root=tmp_path)
    for check in CHECKS:
        assert check.__doc__
        assert PROBLEM not in statuses(check(node)) or check is examining.check_releases


def test_report_gives_each_reason_and_the_same_exports_in_every_form(node_with: Make) -> None:
    found = examine(node_with())
    text, value = as_text(found), as_json(found)
    assert "why: level 2" in text
    assert value["exports"]["TASK_QUEUE_ENABLE"] == "2"
    lines = export_lines(found)
    assert "export TASK_QUEUE_ENABLE=2" in lines
    assert len(lines) == len(value["exports"])
    assert all(line in text for line in lines)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--tensor-model-parallel-size 7 --num-attention-heads 32", "--num-attention-heads 32 is not a multiple of"),
        ("--pipeline-model-parallel-size 5 --num-layers 32", "--num-layers 32 is not a multiple of"),
        ("--pipeline-model-parallel-size 5 --num-layers 32 --noop-layers 3,4,5", None),
        ("--tensor-model-parallel-size 2 --expert-model-parallel-size 3 --num-experts 8", "--num-experts 8 is not"),
        ("--tensor-model-parallel-size 8 --num-attention-heads $HEADS", None),
        ("--tensor-model-parallel-size 7 --num-attention-heads 32 --mm-model model.json", None),
    ],
)
def test_settings_that_megatron_refuses_are_problems(node_with: Make, flags: str, said: str | None) -> None:
    found = list(launch.check_model_sizes(node_with(script=parse_script(f"torchrun t.py {flags}"))))
    assert statuses(found) == ([PROBLEM] if said else [])
    assert said is None or said in found[0].what


def test_sizes_without_a_number_of_processes_are_unknown(node_with: Make) -> None:
    script = parse_script("srun python t.py --tensor-model-parallel-size 4")
    assert statuses(launch.check_world_size(node_with(script=script))) == [UNKNOWN]
    msrun = parse_script("msrun --worker_num 8 --local_worker_num=8 t.py --tensor-model-parallel-size 4")
    assert statuses(launch.check_world_size(node_with(script=msrun))) == [OK]


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("import mindspeed_autoparallel\nfrom megatron.training import pretrain\n", []),
        ("from megatron.training import pretrain\n", [PROBLEM]),
        ("import torch\nfrom megatron.core import mpu\nimport mindspeed_autoparallel\n", [PROBLEM]),
    ],
)
def test_a_program_that_does_not_import_us_first_is_named(
    node_with: Make, tmp_path: Path, program: str, status: list[str]
) -> None:
    (tmp_path / "train.py").write_text(program)
    for switch in ("--auto-tuning", "--auto-parallel-preflight", "--order-microbatches"):
        script = parse_script(f"torchrun train.py {switch}", str(tmp_path / "run.sh"))
        assert statuses(launch.check_import(node_with(script=script))) == status
    without = parse_script("torchrun train.py", str(tmp_path / "run.sh"))
    assert statuses(launch.check_import(node_with(script=without))) == []


@pytest.mark.parametrize("name", ["a" * 5000, "a" * 300, "a\0b"])
def test_names_that_no_file_can_have_are_not_there(node_with: Make, name: str) -> None:
    script = parse_script(f"torchrun {name}.py --auto-tuning --save {name}", "run.sh")
    assert statuses(launch.check_import(node_with(script=script))) == []
    assert examine(node_with(script=script), [])
