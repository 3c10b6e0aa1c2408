"""The torch.cuda facade: its answers, functions that it leaves unchanged, and a complete undo."""

import json
import subprocess
import textwrap

import pytest
from forked_python import forked_python

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

PREPARE = """
import json, os, sys
import torch
from mindspeed_autoparallel.runtime.devices.cpu.adapter import CpuAdapter
device = CpuAdapter()
device.prepare()
"""


def run(code, prelude=PREPARE):
    """In a process of its own: the facade is meant to stay."""
    done = subprocess.run(
        [forked_python(), "-W", "ignore", "-c", prelude + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_tensors_requested_on_cuda_are_created_on_the_cpu():
    devices = run("""
        x = torch.ones(2)
        module = torch.nn.Linear(2, 2)
        cuda = torch.device("cuda", 0)
        tensors = [
            torch.empty(2, device="cuda"), torch.zeros(2, device=torch.cuda.current_device()),
            torch.tensor([1.0], device=cuda), torch.arange(3, device="cuda:0"), torch.ones_like(x, device=cuda),
            torch.randn(2, device=0, pin_memory=True), torch.as_tensor([1], device="cuda"), x.new_empty(2, device="cuda"),
            x.cuda(), x.to("cuda"), x.to(device=0), x.to("cuda", torch.float64), x.pin_memory(),
            module.cuda().weight, module.to("cuda").weight, module.to(device=cuda).bias,
        ]
        print(json.dumps([str(tensor.device) for tensor in tensors] + [str(tensors[11].dtype)]))
        """)
    assert devices == ["cpu"] * 16 + ["torch.float64"]


def test_modules_are_sharded_over_a_mesh_that_is_named_cuda():
    """As Megatron's TorchFullyShardedDataParallel does it."""
    devices = run("""
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
        from torch.distributed.fsdp import fully_shard
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
        meshes = [DeviceMesh.from_group(dist.group.WORLD, "cuda"), init_device_mesh("cuda", (1,))]
        module = fully_shard(torch.nn.Linear(2, 2), mesh=meshes[0])
        module(torch.ones(1, 2)).sum().backward()
        print(json.dumps([mesh.device_type for mesh in meshes] + [str(module.weight.grad.device)]))
        """)
    assert devices == ["cpu"] * 3


def test_streams_events_counters_and_types_answer_as_megatron_expects():
    said = run("""
        stream, event, later = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event()
        with torch.cuda.stream(stream), torch.cuda.device(0):
            event.record(); stream.wait_stream(torch.cuda.current_stream()); later.record()
        torch.ones(1).record_stream(stream)
        torch.cuda.memory._dump_snapshot("nowhere"); torch.cuda.nvtx.range_push("x"); torch.cuda.set_device(0)
        print(json.dumps({
            "ms": event.elapsed_time(later) >= 0,
            "type": [torch.ones(1).type(), torch.ones(1, dtype=torch.bfloat16).type(), torch.ones(1).long().type()],
            "cast": str(torch.ones(1).type("torch.cuda.HalfTensor").dtype),
            "available": [torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.current_device()],
            "stats": torch.cuda.memory_stats()["allocated_bytes.all.peak"],
            "total": torch.cuda.get_device_properties(0).total_memory == device.total_memory_bytes(),
            "accelerator": torch.accelerator.is_available() if hasattr(torch, "accelerator") else False,
        }))
        """)
    assert said == {
        "ms": True,
        "type": ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor", "torch.LongTensor"],
        "cast": "torch.float16",
        "available": [True, 1, 0],
        "stats": 0,
        "total": True,
        "accelerator": False,
    }


def test_the_cpu_generator_plays_the_device_generator():
    equal = run("""
        state = torch.cuda.get_rng_state()
        first = torch.rand(3, device="cuda")
        torch.cuda.set_rng_state(state)
        second = torch.rand(3)
        torch.cuda.manual_seed(7)
        third = torch.rand(3)
        torch.manual_seed(7)
        print(json.dumps([torch.equal(first, second), torch.equal(third, torch.rand(3)), torch.equal(first, third)]))
        """)
    assert equal == [True, True, False]


def test_plain_torch_goes_on_working():
    said = run("""
        import copy, pickle, tempfile
        from torch.utils.data import DataLoader, TensorDataset
        from torch.utils.checkpoint import checkpoint
        from torch._subclasses.fake_tensor import FakeTensorMode
        result = {}
        x = torch.randn(4, 4, requires_grad=True)
        with tempfile.TemporaryFile() as file:
            torch.save({"x": x, "type": torch.float16}, file); file.seek(0)
            result["load"] = torch.equal(torch.load(file, weights_only=False)["x"], x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result["autocast"] = str((x @ x).dtype)
        data = TensorDataset(torch.arange(8.0))
        result["loader"] = [len(batch[0]) for batch in DataLoader(data, batch_size=3, num_workers=1, pin_memory=True)]
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
        optimizer = torch.optim.AdamW(copy.deepcopy(model).parameters(), fused=True)
        checkpoint(model, x, use_reentrant=False).sum().backward()
        result["grad"] = x.grad is not None
        with FakeTensorMode():
            result["fake"] = list((torch.empty(3, 2) @ torch.empty(2, 5, device="cpu")).shape)
        with torch.device("meta"):
            result["meta"] = str(torch.nn.Linear(2, 2).weight.device)
        result["pickle"] = pickle.loads(pickle.dumps(torch.zeros)) is torch.zeros
        with torch.profiler.profile() as profile:
            torch.ones(2).sum()
        result["profile"] = len(profile.key_averages()) > 0
        with tempfile.TemporaryDirectory() as folder:
            with open(folder + "/scripted.py", "w") as file:
                file.write("import torch\\n@torch.jit.script\\ndef f(n: int):\\n    return torch.zeros(n).sum() + 1\\n")
            sys.path.insert(0, folder)
            import scripted
            result["script"] = float(scripted.f(3))
        result["generator"] = float(torch.rand(1, generator=torch.Generator().manual_seed(1))) >= 0
        print(json.dumps(result))
        """)
    assert said == {
        "load": True,
        "autocast": "torch.bfloat16",
        "loader": [3, 3, 2],
        "grad": True,
        "fake": [3, 5],
        "meta": "meta",
        "pickle": True,
        "profile": True,
        "script": 1.0,
        "generator": True,
    }


def test_distributed_jobs_that_ask_for_nccl_run_on_gloo():
    said = run("""
        import torch.distributed as dist
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        store = dist.HashStore()
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
        group = dist.new_group([0], backend="nccl")
        dist.barrier(device_ids=[torch.cuda.current_device()])
        mesh = dist.init_device_mesh("cpu", (1,))
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        print(json.dumps([dist.get_backend(), dist.get_backend(group), x.tolist()]))
        dist.destroy_process_group()
        """)
    assert said == ["gloo", "gloo", [0.0, 1.0, 2.0, 3.0]]


SNAPSHOT = """
import json, os, sys, logging
import torch, torch.distributed
holders = [torch, torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.nvtx, torch.Tensor, torch.nn.Module,
           torch._C, torch.distributed, torch.distributed.distributed_c10d, torch.UntypedStorage]
holders += [torch.accelerator] if hasattr(torch, "accelerator") else []
def snapshot():
    # dict() of vars: the very objects, neither bound nor inherited.
    return [dict(vars(holder)) for holder in holders], dict(os.environ)
def differences(a, b):
    found = [f"{holder}.{name}" for holder, x, y in zip(holders, a[0], b[0])
             for name in x.keys() | y.keys() if x.get(name) is not y.get(name)]
    return found + [name for name in a[1].keys() | b[1].keys() if a[1].get(name) != b[1].get(name)]
from mindspeed_autoparallel.runtime.devices.cpu import adapter, communication, facade, tensors
from torch.utils import _device
_device._device_constructors()
device = adapter.CpuAdapter()
"""


def test_undo_restores_every_original_and_prepare_is_idempotent():
    said = run(
        """
        before = snapshot()
        device.prepare()
        once = snapshot()
        device.prepare()
        result = {"twice": differences(once, snapshot()), "changed": len(differences(before, once))}
        result["left"] = device.undo()
        result["after"] = differences(before, snapshot())
        device.prepare()
        result["again"] = torch.empty(1, device="cuda").device.type
        device.undo()
        result["finally"] = differences(before, snapshot())
        print(json.dumps(result))
        """,
        SNAPSHOT,
    )
    assert said.pop("changed") > 100
    assert said == {"twice": [], "left": [], "after": [], "again": "cpu", "finally": []}


def test_undo_leaves_what_another_plugin_wrapped_since():
    said = run("""
        ours = torch.Tensor.cuda
        theirs = torch.Tensor.cuda = lambda self, *args: ours(self, *args)
        left = device.undo()
        print(json.dumps([left, torch.Tensor.cuda is theirs, str(torch.ones(1).cuda().device)]))
        """)
    assert said == [["Tensor.cuda"], True, "cpu"]


def test_megatron_is_edited_when_it_is_imported_and_only_while_prepared():
    pytest.importorskip("megatron.core")
    said = run("""
        from mindspeed_autoparallel.runtime.devices.cpu import megatron
        device.undo()
        device.prepare()
        import megatron.core.transformer.torch_norm as torch_norm
        import megatron.core.tensor_parallel.random as random
        edited = vars(torch_norm.WrappedTorchNorm)["__new__"].__func__.__module__
        device.undo()
        original = vars(torch_norm.WrappedTorchNorm)["__new__"].__func__.__module__
        stub = hasattr(random, "FP8GlobalStateManager")
        import megatron.core.models.vision.clip_vit_model as late
        defaults = [type(item).__module__ for item in late.CLIPViTModel.__init__.__defaults__]
        untouched = torch.nn.LayerNorm in late.CLIPViTModel.__init__.__defaults__
        device.prepare()
        known = torch.nn.LayerNorm not in late.CLIPViTModel.__init__.__defaults__
        device.undo()
        back = torch.nn.LayerNorm in late.CLIPViTModel.__init__.__defaults__
        print(json.dumps([edited, original, stub, untouched, known, back]))
        """)
    ours = "mindspeed_autoparallel.runtime.devices.cpu.megatron"
    assert said == [ours, "megatron.core.transformer.torch_norm", False, True, True, True]
