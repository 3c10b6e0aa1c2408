"""Blocks and stages in any layout on one process: operators, bytes, collectives and parameters, without a device.

``request``   what is traced: sizes and layout, plain data
``process``   starts tracing processes (nothing of them leaks into the caller) and keeps results by content
``world``     process groups of one layout after the other, pretended or gloo's
``shapes``    operators on tensors without data
``building``  blocks of a megatron-core model
``running``   a block forward and backward, a stage through Megatron's schedule
``tracker``   follows storages, operators and collectives
``handout``   points shared by several tracing processes
``script``    the model of a user's own training script
"""
