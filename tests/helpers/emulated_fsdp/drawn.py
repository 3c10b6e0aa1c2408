"""Random trainings under fully_shard: trees of modules with towers, layers, experts, heads and all prefetch lists."""

import random
from dataclasses import replace

from mindspeed_autoparallel.schedule.sharded import StreamModule, StreamTraining, Unit
from mindspeed_autoparallel.spec.sharded import KEEP, RECOMPUTE


class _Tree:
    def __init__(self, drawn):
        self.drawn, self.modules, self.units = drawn, [], []

    def time(self):
        return self.drawn.randint(1_000, 60_000)

    def add(self, name, parent, *, wrapped, weight=True, tail=False, **values):
        """Add a module; one with a unit of its own holds its parameters there, another in its ancestor's."""
        index = len(self.modules)
        units = ()
        if wrapped:
            units = (len(self.units),)
            self.units.append(Unit(name=name or "root", empty=True, reshard_after_forward=self.drawn.random() < 0.7))
        holder = index
        has_backward = weight or values.get("input_requires_grad", True)
        self.modules.append(
            StreamModule(
                name=name,
                parent=parent,
                units=units,
                forward_ns=self.time(),
                backward_ns=self.time() if has_backward and values.get("needs_backward", True) else 0,
                again_ns=self.time(),
                tail_forward_ns=self.time() if tail else 0,
                tail_backward_ns=self.time() if tail else 0,
                tail_saves=self.drawn.random() < 0.7,
                **values,
            )
        )
        if weight:
            while not self.modules[holder].units:
                holder = self.modules[holder].parent
            unit = self.modules[holder].units[0]
            self.modules[index] = replace(self.modules[index], parameters_of=unit, gradient_bytes=1)
            self.units[unit] = replace(
                self.units[unit],
                empty=False,
                has_gradients=values.get("needs_backward", True)
                or (self.units[unit].has_gradients and not self.units[unit].empty),
            )
        return index

    def hook_at_layers(self, decoder):
        """Gather the units inside layers where their layer begins, each in a context of its own."""
        for index, module in enumerate(self.modules):
            layer = module.parent
            if layer < 0 or self.modules[layer].parent != decoder or not module.units:
                continue
            around = self.modules[layer]
            for unit in around.units:
                self.units[unit] = replace(self.units[unit], context=1)
            self.modules[layer] = replace(around, units=around.units + module.units)
            self.modules[index] = replace(module, units=())


def drawn_training(seed, variant="torch"):
    """Return a random training; the same one for the same seed."""
    drawn = random.Random(seed)
    tree = _Tree(drawn)
    coin = lambda chance=0.5: drawn.random() < chance
    root = tree.add("", -1, wrapped=True, weight=coin(0.3), tail=True, input_requires_grad=False)
    if coin():
        frozen = coin()
        state = {"needs_backward": not frozen}
        tower = tree.add("visual", root, wrapped=coin() or frozen, tail=coin(), input_requires_grad=False, **state)
        for layer in range(drawn.randint(1, 3)):
            policy = RECOMPUTE if coin(0.4) and not frozen else KEEP
            tree.add(
                f"visual.{layer}", tower, wrapped=coin(0.8), policy=policy, input_requires_grad=not frozen, **state
            )
    if coin(0.7):
        tree.add("embedding", root, wrapped=coin(0.8), input_requires_grad=False)
    has_gradients = (len(tree.modules) > 1 and tree.modules[-1].needs_backward) or tree.modules[0].parameters_of >= 0
    decoder = tree.add("decoder", root, wrapped=coin(), weight=True, tail=True, input_requires_grad=has_gradients)
    experts = coin(0.4)
    for layer in range(drawn.randint(2, 6)):
        policy = RECOMPUTE if coin(0.4) else KEEP
        at = tree.add(f"layers.{layer}", decoder, wrapped=coin(0.9), tail=coin(0.5), policy=policy)
        if experts and coin(0.8):
            tree.add(f"layers.{layer}.experts", at, wrapped=coin(0.8))
    tree.add("head", root, wrapped=coin(0.7))
    if variant == "mindspeed-mm" and coin():
        tree.hook_at_layers(decoder)
    for index, module in enumerate(tree.modules):
        units_below = any(other.parent == index and other.units for other in tree.modules)
        # Before 2.14 a unit below is not gathered again for the second part.
        if module.parent == decoder and coin(0.3) and (variant == "torch" or not units_below):
            tree.modules[index] = replace(module, chunks=2)
    replicated = coin(0.4)
    prefetch = [index for index, _ in enumerate(tree.units)]
    for index, unit in enumerate(tree.units):
        times = {
            name: tree.time()
            for name in ("copy_in_ns", "gather_ns", "copy_out_ns", "pack_ns", "reduce_ns", "all_reduce_ns", "finish_ns")
        }
        lists = {}
        if coin(0.3):
            lists["forward_prefetch"] = tuple(drawn.sample(prefetch, min(len(prefetch), drawn.randint(1, 2))))
        if coin(0.3):
            lists["backward_prefetch"] = tuple(drawn.sample(prefetch, min(len(prefetch), drawn.randint(1, 2))))
        tree.units[index] = replace(unit, **times, **lists, replicated=replicated, shard_ranks=4 if replicated else 8)
    if coin(0.4):  # as Megatron recomputes
        tree.modules = [
            replace(one, reentrant=one.policy == RECOMPUTE and one.chunks == 1 and one.input_requires_grad)
            for one in tree.modules
        ]
    return StreamTraining(
        modules=tuple(tree.modules), units=tuple(tree.units), accumulation=drawn.randint(1, 3), variant=variant
    )


def deferring_training(seed):
    """Return a random training that reduces, or frees in backward, in the last of several micro batches alone."""
    training, drawn = drawn_training(seed), random.Random(-1 - seed)
    units = [
        replace(unit, upcast_ns=drawn.randint(1, 9_000), add_ns=drawn.randint(1, 9_000), accumulated_bytes=2)
        for unit in training.units
    ]
    defers, stays = drawn.choice(((True, True), (True, False), (False, True)))
    return replace(
        training, units=tuple(units), accumulation=drawn.randint(2, 4), defers_reduction=defers, stays_gathered=stays
    )
