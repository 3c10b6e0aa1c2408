"""Requirements of every encoder adapter: outputs do not depend on the rank or on the other items of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from mindspeed_autoparallel.runtime.hetero.adapters.protocol import EncoderAdapter, HostModule, LocalItem


@dataclass(frozen=True, kw_only=True)
class EncoderCase:
    """An encoder with its adapter, and microbatches to try them on."""

    module: Any
    """The encoder, in evaluation mode if it draws random numbers in training."""
    adapter: EncoderAdapter
    batches: Sequence[Any]
    """Microbatches as yielded by the host's data iterator: at least two with items, of different sizes if the host
    supports that; one without items if the host can have one."""
    tolerance: float = 1e-5
    """Relative tolerance of outputs and gradients; batches of other sizes may sum in another order."""
    has_gradients: bool = field(default=True)
    """False for a completely frozen encoder."""


class EncoderAdapterSuite:
    """Checks an adapter. Override ``make_case`` and ``call_host``."""

    def make_case(self) -> EncoderCase:
        """Return a fresh encoder, always with the same weights, and the same microbatches."""
        raise NotImplementedError(f"{type(self).__name__} must override make_case")

    def call_host(self, case: EncoderCase, batch: Any) -> Any:
        """Return the encoder's output for ``batch`` as the host's model computes it, without hetero parallel."""
        raise NotImplementedError(f"{type(self).__name__} must override call_host")

    def test_the_batches_say_something(self) -> None:
        case = self.make_case()
        assert sum(bool(case.adapter.items(batch)) for batch in case.batches) >= 2, "give two batches with items"

    def test_items_are_described_in_the_order_of_samples(self) -> None:
        case = self.make_case()
        for batch in case.batches:
            items = case.adapter.items(batch)
            assert [item.sample for item in items] == sorted(item.sample for item in items)
            for item in items:
                assert item.input_rows > 0 and item.output_rows > 0 and item.cost > 0, item
                assert len(item.meta) == case.adapter.meta_size, item
                assert all(isinstance(number, int) for number in (item.input_rows, item.output_rows, *item.meta)), item
                if item.first_token is not None:
                    assert 0 <= item.first_token <= item.num_tokens - item.output_rows, item

    def test_rows_are_those_of_the_items(self) -> None:
        case = self.make_case()
        for batch in case.batches:
            items = case.adapter.items(batch)
            if items:
                rows = case.adapter.rows(batch)
                assert tuple(rows.shape) == (sum(item.input_rows for item in items), *case.adapter.input_shape)
                assert rows.dtype == case.adapter.input_dtype

    def test_outputs_are_as_described(self) -> None:
        case = self.make_case()
        for items, rows in self._with_items(case):
            output = case.adapter.encode(case.module, rows, items)
            assert tuple(output.shape) == (sum(item.output_rows for item in items), *case.adapter.output_shape)
            assert output.dtype == case.adapter.output_dtype

    def test_items_of_several_batches_can_be_encoded_together(self) -> None:
        import torch

        case = self.make_case()
        parts = self._with_items(case)
        alone = torch.cat([case.adapter.encode(case.module, rows, items) for items, rows in parts])
        items = [item for own, _ in parts for item in own]
        together = case.adapter.encode(case.module, torch.cat([rows for _, rows in parts]), items)
        self._assert_close(case, together, alone, "encoded together and batch by batch")

    def test_items_can_be_encoded_in_another_order(self) -> None:
        import torch

        case = self.make_case()
        items, rows = max(self._with_items(case), key=lambda part: len(part[0]))
        inputs = rows.split([item.input_rows for item in items])
        outputs = case.adapter.encode(case.module, rows, items).split([item.output_rows for item in items])
        order = list(reversed(range(len(items))))
        changed = case.adapter.encode(case.module, torch.cat([inputs[i] for i in order]), [items[i] for i in order])
        self._assert_close(case, changed, torch.cat([outputs[i] for i in order]), "encoded in reversed order")

    def test_the_host_gets_what_its_own_call_returns(self) -> None:
        case = self.make_case()
        for batch in case.batches:
            items = case.adapter.items(batch)
            if items:
                rows = case.adapter.encode(case.module, case.adapter.rows(batch), items)
                given, own = case.adapter.embeddings(rows), self.call_host(case, batch)
                for ours, hosts in zip(_tensors(given), _tensors(own), strict=True):
                    assert ours.shape == hosts.shape and ours.dtype == hosts.dtype
                    self._assert_close(case, ours, hosts, "embeddings and the host's own call")

    def test_gradients_are_those_of_the_hosts_own_call(self) -> None:
        ours, own = self.make_case(), self.make_case()
        if not ours.has_gradients:
            return
        for batch in ours.batches:
            items = ours.adapter.items(batch)
            if items:
                rows = ours.adapter.encode(ours.module, ours.adapter.rows(batch), items)
                _weighted_sum(ours.adapter.embeddings(rows)).backward()
        for batch in own.batches:
            if own.adapter.items(batch):
                _weighted_sum(self.call_host(own, batch)).backward()
        pairs = list(zip(ours.module.named_parameters(), own.module.parameters(), strict=True))
        assert any(parameter.grad is not None for (_, parameter), _ in pairs), "no parameter got a gradient"
        for (name, parameter), other in pairs:
            assert (parameter.grad is None) == (other.grad is None), name
            if parameter.grad is not None:
                self._assert_close(ours, parameter.grad, other.grad, f"gradients of {name}")

    def test_the_stand_in_is_a_legal_input_that_changes_nothing(self) -> None:
        case = self.make_case()
        rows, items = case.adapter.dummy()
        assert tuple(rows.shape) == (sum(item.input_rows for item in items), *case.adapter.input_shape)
        output = case.adapter.encode(case.module, rows, items)
        assert tuple(output.shape) == (sum(item.output_rows for item in items), *case.adapter.output_shape)
        if case.has_gradients:
            (output.float() * 0).sum().backward()
            for name, parameter in case.module.named_parameters():
                assert parameter.grad is None or not parameter.grad.any(), name

    def _with_items(self, case: EncoderCase) -> list[tuple[Sequence[LocalItem], Any]]:
        found = [(case.adapter.items(batch), batch) for batch in case.batches]
        return [(items, case.adapter.rows(batch)) for items, batch in found if items]

    def _assert_close(self, case: EncoderCase, given: Any, expected: Any, what: str) -> None:
        difference = (given.float() - expected.float()).abs().max().item()
        scale = expected.float().abs().max().item()
        assert difference <= case.tolerance * max(scale, 1e-6), f"{what} differ by {difference:.3g} of {scale:.3g}"


class HostModuleSuite(EncoderAdapterSuite):
    """Checks a host module and the adapter that it creates. Override ``make_host`` and ``call_host``.

    Megatron's parallel state must be initialized for the encoder, as hetero parallel does before it builds.
    """

    def make_host(self) -> tuple[HostModule, Any, Sequence[Any]]:
        """Return the host module, the script's arguments, and microbatches; seed the random numbers of ``build``."""
        raise NotImplementedError(f"{type(self).__name__} must override make_host")

    def make_case(self) -> EncoderCase:
        """Build the encoder and its adapter."""
        host, arguments, batches = self.make_host()
        module = host.build(arguments)
        return EncoderCase(
            module=module, adapter=cast("EncoderAdapter", host.adapter(module, arguments)), batches=batches
        )

    def test_the_encoder_carries_megatrons_config(self) -> None:
        config = self.make_case().module.config
        for name in ("tensor_model_parallel_size", "params_dtype", "num_layers"):
            assert hasattr(config, name), f"the encoder's config has no {name}, which gradient reduction uses"

    def test_the_adapter_has_all_that_is_asked_of_one(self) -> None:
        adapter = self.make_case().adapter
        shapes = (adapter.input_shape, adapter.output_shape)
        assert all(isinstance(size, int) and size > 0 for shape in shapes for size in shape)
        assert isinstance(adapter.meta_size, int) and adapter.meta_size >= 0
        for name in ("items", "rows", "encode", "dummy", "embeddings"):
            assert callable(getattr(adapter, name)), name


def _tensors(value: Any) -> list[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)]


def _weighted_sum(value: Any) -> Any:
    """Return a sum with a distinct weight per element, so that rows in a wrong order change it."""
    import torch

    total = torch.zeros(())
    for tensor in _tensors(value):
        weights = torch.linspace(0.5, 1.5, tensor.numel(), device=tensor.device)
        total = total.to(tensor.device) + (tensor.float().reshape(-1) * weights).sum()
    return total
