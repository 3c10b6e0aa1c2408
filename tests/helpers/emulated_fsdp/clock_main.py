"""Cases (JSON of StreamTraining) in on standard input, what torch did out: spans and the end of each step."""

import contextlib
import importlib.util
import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

NAMES = ("compute", "copy in", "gather", "reduce", "all-reduce")


class Stream:
    def __init__(self, name):
        self.name, self.now = name, 0

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        self.now = max(self.now, event.moment)

    def wait_stream(self, stream):
        self.now = max(self.now, stream.now)


class Event:
    def __init__(self, *_, **__):
        self.moment = 0

    def record(self, stream=None):
        self.moment = (stream or DEVICE.stack[-1]).now
        return self

    def synchronize(self):
        pass


class Device:
    """What ``torch.cuda`` is to FSDP; streams come in the order in which FSDP makes them."""

    Event = Event

    def __init__(self):
        self.begin()

    def begin(self):
        self.compute = Stream("compute")
        self.stack = [self.compute]
        self.names = iter(NAMES[1:])
        self.spans = []

    def Stream(self, priority=0):  # noqa: N802
        return Stream(next(self.names))

    def current_stream(self, *_):
        return self.stack[-1]

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    @contextlib.contextmanager
    def stream(self, stream):
        self.stack.append(stream)
        try:
            yield
        finally:
            self.stack.pop()

    def run(self, what, duration):
        stream = self.stack[-1]
        self.spans.append([stream.name, what, stream.now, stream.now + duration])
        stream.now += duration


DEVICE = Device()
UNITS = {}
"""Parameter group to its record, while it acts."""
ACTING = []


def charge(word, key):
    unit = ACTING[-1]
    DEVICE.run([word, unit["name"]], unit[key])


class Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, record, tail):
        again = torch._C._current_graph_task_id() != -1
        key = "tail_forward_ns" if tail else "again_ns" if again and record["top"] else "forward_ns"
        DEVICE.run([("A" if again else "F") + ("T" if tail else ""), record["name"]], record[key])
        if not tail or record["tail_saves"]:
            ctx.save_for_backward(x, weight)
        ctx.record, ctx.tail = record, tail
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        _, weight = ctx.saved_tensors or (None, None)
        key = "tail_backward_ns" if ctx.tail else "backward_ns"
        DEVICE.run(["BT" if ctx.tail else "B", ctx.record["name"]], ctx.record[key])
        return grad, None if weight is None else torch.zeros_like(weight), None, None


class Work(nn.Module):
    def __init__(self, case, index):
        super().__init__()
        self.record = case["modules"][index]
        self.record["top"] = self.record["policy"] not in ("keep", "offload")
        unit = self.record["parameters_of"]
        self.weight = None
        if unit >= 0:
            self.weight = nn.Parameter(torch.zeros(16, 16), requires_grad=self.record["needs_backward"])
        self.below = nn.ModuleList(
            Work(case, child) for child, module in enumerate(case["modules"]) if module["parent"] == index
        )

    def forward(self, x):
        if self.record["chunks"] > 1:
            return torch.cat([self.part(part) for part in x.chunk(self.record["chunks"])])
        return self.part(x)

    def part(self, x):
        if self.record["top"] and not self.record["reentrant"]:
            return checkpoint(self.work, x, use_reentrant=False)
        return self.work(x)

    def called(self, x):
        """The module called as its parent calls it: a reentrant checkpoint stands around it, as Megatron's does."""
        if self.record["top"] and self.record["reentrant"]:
            return checkpoint(self, x, use_reentrant=True)
        return self(x) if self.record["input_requires_grad"] else self(x.detach())

    def work(self, x):
        y = Timed.apply(x, self.weight, self.record, False)
        for child in self.below:
            y = child.called(y) if child.record["input_requires_grad"] else y + child.called(y)
        if self.record["tail_forward_ns"]:
            y = Timed.apply(y, None, self.record, True)
        return y + 0


PACKAGE = "torch.distributed.fsdp._fully_shard."


def use_device():
    """Let FSDP find streams and events, as on an accelerator."""
    for name in ("_fsdp_param_group", "_fsdp_state", "_fsdp_collectives", "_fsdp_param"):
        module = importlib.import_module(PACKAGE + name)
        if hasattr(module, "_get_device_handle"):
            module._get_device_handle = lambda *_: DEVICE
    torch.accelerator.current_stream = lambda *_: DEVICE.current_stream()


def patch():
    use_device()
    group = importlib.import_module(PACKAGE + "_fsdp_param_group")
    collectives = importlib.import_module(PACKAGE + "_fsdp_collectives")

    def within(name):
        inner = getattr(group.FSDPParamGroup, name)

        def call(self, *args, **kwargs):
            ACTING.append(UNITS[id(self)])
            try:
                return inner(self, *args, **kwargs)
            finally:
                ACTING.pop()

        setattr(group.FSDPParamGroup, name, call)

    for name in ("unshard", "wait_for_unshard", "post_backward"):
        within(name)
    charge_accumulation()

    def charged(owner, name, word, key):
        inner = getattr(owner, name)

        def call(*args, **kwargs):
            if ACTING:
                charge(word, key)
            return inner(*args, **kwargs)

        setattr(owner, name, call)

    # Touch the operators first: the namespace makes them when they are read.
    charged(torch.ops.fsdp, "all_gather_copy_in", "copy in", "copy_in_ns")
    charged(torch.ops.fsdp, "split_with_sizes_copy", "copy out", "copy_out_ns")
    charged(torch.ops.fsdp, "chunk_cat", "pack", "pack_ns")
    new = hasattr(dist, "all_gather_single")
    charged(dist, "all_gather_single" if new else "all_gather_into_tensor", "gather", "gather_ns")
    charged(dist, "reduce_scatter_single" if new else "reduce_scatter_tensor", "reduce", "reduce_ns")
    charged(dist, "all_reduce", "all-reduce", "all_reduce_ns")
    charged(collectives, "_to_dtype_if_needed", "finish", "finish_ns")


def charge_accumulation():
    """Charge what a group's gradients take that wait for the last micro batch, with its first parameter."""
    parameter = importlib.import_module(PACKAGE + "_fsdp_param").FSDPParam
    for name, word, key in (
        ("accumulate_unsharded_grad_if_needed", "add", "add_ns"),
        ("to_accumulated_grad_if_needed", "upcast", "upcast_ns"),
    ):
        inner = getattr(parameter, name)

        def call(self, inner=inner, word=word, key=key):
            before = self.unsharded_accumulated_grad
            made = hasattr(self, "_unsharded_param") and self._unsharded_param.grad is not None
            inner(self)
            span = [word, ACTING[-1]["name"]]
            if made and (word == "upcast" or before is not None) and span not in CHARGED:
                CHARGED.append(span)
                charge(word, key)

        setattr(parameter, name, call)


CHARGED = []
"""Additions and casts of this micro batch."""


def run(case):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # after a host has put its own there

    UNITS.clear()
    DEVICE.begin()
    size = dist.get_world_size()
    meshes = {
        False: init_device_mesh("cpu", (size,)),
        True: init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")),
    }
    root = Work(case, 0)
    found = {}
    order = [root]
    for module in order:
        found[module.record["name"]] = module
        order.extend(module.below)
    hooks = {unit: found[module["name"]] for module in case["modules"] for unit in module["units"]}
    by_unit = {index: found[unit["name"].replace("root", "")] for index, unit in enumerate(case["units"])}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index in reversed(range(len(case["units"]))):
        unit, module = case["units"][index], by_unit[index]
        fully_shard(
            module,
            mesh=meshes[unit["replicated"]],
            reshard_after_forward=unit["reshard_after_forward"],
            mp_policy=policy,
            **({} if module is hooks[index] else {"hook_module": hooks[index]}),
        )
    for index, unit in enumerate(case["units"]):
        by_unit[index].set_modules_to_forward_prefetch([by_unit[other] for other in unit["forward_prefetch"]])
        by_unit[index].set_modules_to_backward_prefetch([by_unit[other] for other in unit["backward_prefetch"]])
        state = by_unit[index]._get_fsdp_state()
        if state._fsdp_param_group is not None:
            UNITS[id(state._fsdp_param_group)] = unit
        if (state._fsdp_param_group is None) != unit["empty"]:
            raise AssertionError(f"unit {unit['name']}: empty or not")
    for step in range(case["accumulation"]):
        last = step == case["accumulation"] - 1
        root.set_is_last_backward(last or (case["defers_reduction"] and not case["stays_gathered"]))
        root.set_requires_all_reduce(last)
        root.set_reshard_after_backward(last or not case["stays_gathered"])
        if case["defers_reduction"]:
            root.set_requires_gradient_sync(last)
        CHARGED.clear()
        root(torch.zeros(2, 16)).sum().backward()
    return {"step_ns": DEVICE.compute.now, "spans": DEVICE.spans}


def use_host(path):
    """Put a host's own copy of fully_shard in torch's place, as MindSpeed-MM's ops/fully_shard/fully_shard.py."""
    spec = importlib.util.spec_from_file_location("host_fully_shard", path)
    host = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(host)
    host.apply_fully_shard_patch()
    host._get_device_handle = lambda *_: DEVICE


def main():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    if len(sys.argv) > 1:
        use_host(sys.argv[1])
    patch()
    print(json.dumps([run(case) for case in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
