"""One layer in any layout on one process: operators, saved bytes, peaks, collectives and parameters, without a device.

``request``   what is traced: sizes and layout, plain data
``tracker``   follows storages, operators and collectives
``layer``     builds the layer with megatron-core and runs it forward and backward
``process``   starts the tracing process (nothing of it leaks into the caller) and keeps results by content
"""
