"""Let MindSpeed-MM's native FSDP2 trainer run on CPU processes with gloo; first on PYTHONPATH, nothing of it is edited.

Each function below repairs one module when that has been imported, and names what the module expects of an accelerator.
"""

import importlib.abc
import importlib.util
import itertools
import os
import sys

REPAIRS = {}


def repairs(name):
    def register(function):
        REPAIRS[name] = function
        return function

    return register


class RepairingFinder(importlib.abc.MetaPathFinder):
    def __init__(self):
        self.looking_for = set()

    def find_spec(self, name, path=None, target=None):
        if name not in REPAIRS or name in self.looking_for:
            return None
        self.looking_for.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking_for.discard(name)
        execute = spec.loader.exec_module

        def execute_and_repair(module):
            execute(module)
            REPAIRS[name](module)

        spec.loader.exec_module = execute_and_repair
        return spec


@repairs("mindspeed_mm.fsdp.utils.device")
def device(module):
    """Streams, events, memory counters and a backend for "cpu"; seeds that torch.manual_seed has set."""
    import torch

    module.get_dist_comm_backend = lambda cpu=False: "gloo"
    module.create_stream = lambda device=None, priority=0: torch.cpu.Stream()
    module.create_event = lambda enable_timing=False, blocking=False: torch.cpu.Event()
    for kind in ("memory_reserved", "max_memory_reserved", "memory_allocated", "max_memory_allocated"):
        setattr(module, f"get_{kind}", lambda *args, **kwargs: 0)
    module.reset_peak_memory_stats = lambda *args, **kwargs: None
    torch.cpu.manual_seed = torch.cpu.manual_seed_all = lambda seed: None
    torch.cpu.empty_cache = lambda: None
    torch.cpu.get_device_name = lambda *args: "cpu"
    accelerator = torch.accelerator
    accelerator.set_device_index = lambda index: None
    accelerator.current_device_index = accelerator.current_device_idx = lambda: "cpu"  # used as a device
    accelerator.current_accelerator = lambda *args, **kwargs: torch.device("cpu")
    without_keyword(torch.distributed, "init_process_group", "device_id")  # gloo has no device index
    without_keyword(torch, "empty", "pin_memory")
    histogram = torch.histc  # of integers it exists on accelerators alone
    torch.histc = lambda values, *args, **kwargs: histogram(values.float(), *args, **kwargs).to(values.dtype)
    for name, place in (("all_reduce", 1), ("reduce_scatter_tensor", 2)):
        setattr(torch.distributed, name, summed(getattr(torch.distributed, name), place))
    gather = torch.distributed.all_gather_into_tensor

    def gather_flat(output_tensor, input_tensor, *args, **kwargs):
        # gloo looks at shapes, NCCL and HCCL at the number of elements.
        flat = output_tensor.is_contiguous() and input_tensor.is_contiguous()
        if flat and output_tensor.dim() != input_tensor.dim():
            output_tensor, input_tensor = output_tensor.view(-1), input_tensor.view(-1)
        return gather(output_tensor, input_tensor, *args, **kwargs)

    torch.distributed.all_gather_into_tensor = gather_flat


def without_keyword(owner, name, keyword):
    original = getattr(owner, name)

    def call(*args, **kwargs):
        kwargs.pop(keyword, None)
        return original(*args, **kwargs)

    setattr(owner, name, call)


def summed(original, place):
    """gloo has SUM, and neither AVG nor PREMUL_SUM: sum, then scale."""
    import torch.distributed as dist

    def call(*args, **kwargs):
        operation = args[place] if len(args) > place else kwargs.get("op")
        group = args[place + 1] if len(args) > place + 1 else kwargs.get("group")
        factor = None
        if operation is not None and operation == dist.ReduceOp.AVG:
            factor = 1 / dist.get_world_size(group)
        elif operation is not None and operation == dist.ReduceOp.PREMUL_SUM:
            factor = operation.__getstate__()[1]
        if factor is None:
            return original(*args, **kwargs)
        args = (*args[:place], dist.ReduceOp.SUM, *args[place + 1 :]) if len(args) > place else args
        kwargs |= {"op": dist.ReduceOp.SUM} if "op" in kwargs else {}
        work = original(*args, **kwargs)
        if work is not None:
            work.wait()
        (args[0] if args else kwargs.get("tensor", kwargs.get("output"))).mul_(factor)
        return work

    return call


@repairs("transformers.modeling_flash_attention_utils")
def flash_attention(module):
    """Ulysses exchanges heads inside flash attention alone; the same sums by torch's own operator."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attend

    def forward(query, key, value, attention_mask=None, query_length=None, is_causal=True, **kwargs):
        repeats, scale, ends = query.shape[2] // key.shape[2], kwargs.get("softmax_scale"), kwargs.get("cu_seq_lens_q")
        query = query.transpose(1, 2)
        key, value = (part.repeat_interleave(repeats, 2).transpose(1, 2) for part in (key, value))
        bounds = [0, query.shape[2]] if ends is None else [int(end) for end in ends]
        parts = [
            attend(*(part[:, :, low:high] for part in (query, key, value)), is_causal=is_causal, scale=scale)
            for low, high in itertools.pairwise(bounds)
        ]
        return torch.cat(parts, 2).transpose(1, 2)

    module._flash_attention_forward = forward
    module.lazy_import_flash_attention = lambda *args, **kwargs: (None,) * 4


@repairs("transformers.modeling_utils")
def dispatch(module):
    """No package flash_attn is needed for the function above."""
    module.PreTrainedModel._flash_attn_2_can_dispatch = lambda self, is_init_check=False: True


@repairs("transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe")
def omni_configuration(module):
    """transformers 5.0.0 reads this attribute before it sets it."""
    module.Qwen3OmniMoeTalkerCodePredictorConfig.use_sliding_window = False


@repairs("mindspeed_mm.fsdp.ops.fully_shard.fully_shard")
def hybrid_shard(module):
    """torch makes no all-reduce event on CPU, and the host's copy of post_backward asserts one."""
    import torch

    reduce = module.foreach_reduce

    def reduce_with_event(*args, **kwargs):
        result = list(reduce(*args, **kwargs))
        if result[3] is not None and result[4] is None:
            result[4] = torch.cpu.Event()
        return tuple(result)

    module.foreach_reduce = reduce_with_event


if os.environ.get("NON_MEGATRON") == "true":
    sys.meta_path.insert(0, RepairingFinder())
