"""Blocks and stages in any layout on one process: operators, bytes, collectives and parameters, without a device.

``request``   what is traced: sizes and layout, plain data
``process``   starts tracing processes (nothing of them leaks into the caller) and keeps results by content
``results``   the result of a trace of a block or a stage
``world``     process groups of one layout after the other, fake or gloo's
``tensor_shapes``    operators on tensors without data
``building``  blocks of a megatron-core model
``running``   a block forward and backward, a stage through Megatron's schedule
``fake_tensors``  the tracer: operators on tensors with and without data, collectives, storages
``fake_host``     what a user's script is given in place of a device and data
``work_queue``    points shared by several tracing processes
``script``    the model of a user's own training script
"""
