"""The replay's input for one device: modules, ``fully_shard`` units, times and bytes. Times are nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.spec.sharded import KEEP, OFFLOAD, RECOMPUTE_OFFLOAD


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters that are gathered, freed and reduced together."""

    name: str
    copy_in_ns: int = 0
    """Casting and copying the shard into the gather's buffer, on a separate queue."""
    gather_ns: int = 0
    copy_out_ns: int = 0
    """From the gather's buffer to the parameters, on the compute queue."""
    pack_ns: int = 0
    """From gradients to the reduction's buffer, on the compute queue."""
    reduce_ns: int = 0
    all_reduce_ns: int = 0
    """All-reduce over the replicas of HSDP."""
    finish_ns: int = 0
    """Casting and adding the reduced shard, on the queue that reduced it last."""
    empty: bool = False
    """Whether it has no parameters: only its prefetch lists act."""
    has_gradients: bool = True
    replicated: bool = False
    """Whether gradients are reduced over replicas too, once a step."""
    reshard_after_forward: bool = True
    forward_prefetch: tuple[int, ...] = ()
    """Units gathered when this one's forward begins."""
    backward_prefetch: tuple[int, ...] = ()
    """The same in backward; empty: torch's default, the unit that ran before it."""
    context: int = 0
    """Communication context: units hooked at one module have several (MindSpeed-MM)."""
    shard_ranks: int = 2
    elements: int = 0
    """Of its parameters, padded, those of all shards; a unit whose parameters ``fully_shard`` ignores is ``empty``."""
    flat_bytes: int = 0
    """The shard in the gathered type, during the copy-in."""
    gathered_bytes: int = 0
    """The gather's buffer, and likewise the parameters."""
    gradient_bytes: int = 0
    accumulated_bytes: int = 0
    """Gradients that wait for the last micro batch's, in the reduction's type; 0 if gradients have it anyway."""
    upcast_ns: int = 0
    """From gradients to ``accumulated_bytes``, on the compute queue."""
    add_ns: int = 0
    """Adding gradients to ``accumulated_bytes``, on the compute queue."""
    reduced_bytes: int = 0
    """The reduction's buffer."""
    output_bytes: int = 0
    """The reduced shard in the reduction's type."""
    sharded_gradient_bytes: int = 0
    """The same in the optimizer's type; equal types share memory."""
    cast_gradient: bool = False
    """Whether the two types differ."""
    strided: bool = False
    """Whether it is cut along another dimension than the first: parameters and gradients need another copy."""


@dataclass(frozen=True, kw_only=True)
class StreamModule:
    """One module's work, without its children's."""

    name: str
    parent: int = -1
    units: tuple[int, ...] = ()
    """Units whose hooks run at this module, in the order in which their forward hooks run."""
    forward_ns: int = 0
    backward_ns: int = 0
    tail_forward_ns: int = 0
    tail_backward_ns: int = 0
    again_ns: int = 0
    """``forward_ns`` in recomputation: less if the outputs of attention are kept."""
    policy: str = KEEP
    input_requires_grad: bool = True
    needs_backward: bool = True
    parameters_of: int = -1
    """Unit that holds its parameters: gradients appear in its backward."""
    output_bytes: int = 0
    """Bytes of its output, whose gradient is alive during its backward."""
    input_bytes: int = 0
    kept_bytes: int = 0
    """Bytes saved between forward and backward in addition to the input, under its policy."""
    again_bytes: int = 0
    """Bytes saved additionally by recomputation, until the backward ends."""
    forward_transient_bytes: int = 0
    unsaved_bytes: tuple[int, int] | None = None
    """Transient bytes of a first forward that saves nothing, above its start: up to the end of its children, and after
    it; ``None``: those of any forward."""
    around_bytes: int = 0
    """Held in variables by the module around it while its forward runs."""
    backward_transient_bytes: int = 0
    made_gradient_bytes: int = 0
    """Part of ``backward_transient_bytes`` that a later part of a micro batch adds to existing gradients."""
    tail_kept_bytes: int = 0
    tail_again_bytes: int = 0
    """``again_bytes`` of the work after its children."""
    tail_saves: bool = True
    """Whether the work after its children saves anything; otherwise its backward starts no recomputation."""
    tail_forward_transient_bytes: int = 0
    tail_backward_transient_bytes: int = 0
    gradient_bytes: int = 0
    """Bytes of its parameters' gradients in backward."""
    chunks: int = 1
    """Parts of a micro batch that it and all below run one after another, under one gather: forward passes, and then
    each part's recomputation and backward. Times and saved bytes, the input's left out, are those of one part."""
    reentrant: bool = False
    """Whether recomputation calls it again as a whole, hooks included, as a reentrant checkpoint around it does; else
    the checkpoint is inside it and ends with the last tensor that backward needs."""
    copies: int = 1
    """Number of copies of its input under an offloading policy."""
    copy_ns: int = 0

    @property
    def offloads(self) -> bool:
        """Return whether its input is offloaded to the host."""
        return self.policy in (OFFLOAD, RECOMPUTE_OFFLOAD)

    @property
    def recomputes(self) -> bool:
        """Return whether its forward runs again before its backward."""
        return self.policy not in (KEEP, OFFLOAD)


@dataclass(frozen=True, kw_only=True)
class StreamTraining:
    """One step of one device."""

    modules: tuple[StreamModule, ...]
    """Modules in the order of forward, parents first; the root first."""
    units: tuple[Unit, ...]
    """Units in the order of ``named_modules``: the root's first."""
    accumulation: int = 1
    variant: str = "torch"
    """One of ``spec.sharded.VARIANTS``, or ``MEGATRON_FSDP``."""
    unit_elements: int = 0
    """Megatron-FSDP's unit size: half of it is gathered ahead, and all of it waits for its reduction."""
    last_offload_stays: bool = True
    defers_reduction: bool = False
    """Whether gradients are reduced once a step, in the last micro batch."""
    stays_gathered: bool = False
    """Whether backward frees parameters in the last micro batch alone, which then is also torch's last backward."""
    static_bytes: int = 0
    """Bytes that are always alive: shards of parameters, optimizer state, buffers."""
    optimizer_ns: int = 0
    optimizer_transient_bytes: int = 0
