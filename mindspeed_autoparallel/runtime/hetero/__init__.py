"""Hetero parallel: every module of a multimodal model trains under its own tensor, pipeline and context layout.

layouts, blocks  the layouts of model.json, checked against the world (pure Python)
redistribution/  who computes which item and which rows travel where (pure Python)
job              the one job of this process; what the patches of the host call
states, rng      one Megatron parallel_state per module, switched online, and its random states
building         model and optimizer, built by the host's own functions
modules          one DDP per module; optimizer, optimizer_state: one optimizer over all of them
adapters/        how a host model names its items and takes its embeddings
session          the modules of one job together: placements, groups, times
batches          the step's raw batches, read ahead and handed to the stock schedule
exchange         one all-to-all-v per plan, bytes counted, and the items of a step
macrobatches     one encoder's part of a step; encode and output_cache are its two ends
generators       one generator's part of a step; generator_work is what it computes
pipeline         an encoder's own pipeline, by the stock schedule
schedules        when macro-batches are encoded and taken back, and when generators exchange
phases           encode, the stock schedule, encoder backward
reporting        times and bytes beside the host's log line
"""
