"""Blocks and stages in any layout on one process: operators, bytes, collectives and parameters, without a device.

For a described block, by ``mindspeed-autoparallel trace``:

``request``   sizes and layout as plain data, and the result
``process``   starts tracing processes (isolated from the caller) and caches results by content and source files
``world``     process groups of one layout after the other, fake or gloo's
``building``  blocks of a megatron-core model
``running``   a block forward and backward, a stage through Megatron's schedule

For a user's own training script, also for ``--auto-tuning``:

``script``    one layout of the script's model
``task``, ``worker``  the layouts of a process, and their traces of the script's model in it
``work_queue``    layouts shared by several such processes
``layer_signatures``  which layers compute alike, and whether the model fits without recompute
``fake_host``     batches without data and a device whose clock counts calls

``fake_tensors``  the tracer of both: operators on tensors with and without data, collectives, storages
"""
