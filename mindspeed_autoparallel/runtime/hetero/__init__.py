"""Hetero parallel: every module of a multimodal model trains under its own tensor, pipeline and context layout.

layouts, blocks  the layouts of model.json, checked against the world (pure Python)
redistribution/  the owner of each item and the transfers of rows (pure Python)
job              the job of this process; functions that the host's patches call
states, rng      one Megatron parallel_state per module, switched at run time, and its random states
building         model and optimizer, built by the host's own functions
modules          one DDP per module; optimizer, optimizer_state: one optimizer over all of them
adapters/        items of a host's batches, and embeddings in the form that its model expects
session          the modules of one job together: placements, groups, times
batches          the step's raw batches, read ahead and passed to the stock schedule
exchange         one all-to-all-v per plan, counted in bytes, and the all-gather of a step's items
macrobatches     one encoder's part of a step; encode computes rows, output_cache serves them to the model
generators       one generator's part of a step; generator_work is its computation
pipeline         an encoder's own pipeline, by the stock schedule
schedules        when macro-batches run forward and backward, and when generators exchange
phases           encode, the stock schedule, encoder backward
reporting        times and bytes, logged with the host's line
checkpoint       random states of encoders and generators in a checkpoint
"""
