"""A training loop of the host's own, with what made the plugin fail inside the real one.

Arguments are parsed twice, the first of them decides about a search of the host's own, names are imported from Megatron
by ``from``, ``train`` and ``train_step`` are decorated, and a feature may put its own function in the place of another.
"""

import functools

from megatron.training.arguments import parse_args
from megatron.training.training import setup_model_and_optimizer

CALLS: list[str] = []


def own_flags(parser):
    """Register flags of ours as MindSpeed does: without a default, as text, and one with a meaning of its own."""
    parser.add_argument("--master-port", type=str, default=None)
    parser.add_argument("--hetero-parallel", action="store_true", help="the host's own")
    return parser


def with_profiler(function):
    """Decorate as MindSpeed-MM's auto settings do."""

    @functools.wraps(function)
    def profiled(*args, **kwargs):
        return function(*args, **kwargs)

    return profiled


def pretrain(before_training=lambda: None):
    """Parse twice, set up, and train; return the arguments of both parses."""
    first = parse_args(own_flags, False)
    if getattr(first, "auto_parallel_mm", False):
        import mindspeed.core.auto_parallel.mm_search  # noqa: F401  # exists in core_r0.8.0 only
    second = parse_args(own_flags)
    before_training()
    CALLS.append(f"set up by {setup_model_and_optimizer.__module__}")
    train(None, [], None, None, None, None, None, None)
    return first, second


@with_profiler
def train(
    forward_step_func,
    model,
    optimizer,
    opt_param_scheduler,
    train_data_iterator,
    valid_data_iterator,
    process_non_loss_data_func,
    config,
    call_backs=None,
):
    """Train one step."""
    CALLS.append("train")
    train_step(forward_step_func, train_data_iterator, model, optimizer, opt_param_scheduler, config, call_backs)


@with_profiler
def train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, call_backs):
    """Take no step."""
    CALLS.append("train_step")


def training_log(loss_dict, total_loss_dict, learning_rate, decoupled_learning_rate, iteration, *rest):
    """Log nothing."""
