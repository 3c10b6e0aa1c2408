"""Small interleaved pipelines of two kinds of layers, drawn at random."""

from mindspeed_autoparallel.planner.split import LayerKind, Segment, SplitProblem
from mindspeed_autoparallel.planner.split.model.problem import fullest_moments
from mindspeed_autoparallel.schedule import group_sizes, make_program


def pipeline(drawn, stages, chunks, microbatches, layers, room):
    """Two kinds of layers, one after the other; ``room``: memory as a share of what all layers would need evenly."""
    group_size = group_sizes(stages, microbatches)[0]
    program = make_program("interleaved", stages, microbatches, chunks, group_size)
    moments = fullest_moments(program)
    first = drawn.randint(1, layers - 1)
    virtual = stages * chunks
    segments = []
    for index, count in enumerate((first, layers - first)):
        forward, saved = drawn.randint(5, 40), drawn.randint(4, 20)
        kinds = (
            LayerKind(name="none", memory=(3,) * virtual, saved=saved),
            LayerKind(
                name="full", memory=(3,) * virtual, saved=1, extra_backward=forward, transient=drawn.choice([0, 5])
            ),
        )
        segments.append(
            Segment(
                name=f"m{index}",
                num_layers=count,
                forward=forward,
                backward=2 * forward,
                kinds=kinds,
                predecessors=(0,) if index else (),
            )
        )
    whole = sum(s.num_layers * s.kinds[0].saved for s in segments) / virtual
    limit = int(room * whole * max(sum(moment) for moment in moments[0])) + 3 * layers
    return SplitProblem(
        segments=tuple(segments),
        num_stages=stages,
        num_chunks=chunks,
        num_microbatches=microbatches,
        schedule="interleaved",
        memory_limit=(limit,) * stages,
        link=(drawn.randint(0, 4),) * (virtual - 1),
        in_flight=moments,
        microbatch_group_size=group_size,
        sends=drawn.choice(["eager", "freed"]),
    )
