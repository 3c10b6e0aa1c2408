"""Hetero parallel: every module of a multimodal model trains under its own tensor, pipeline and context layout.

layouts          what model.json asks for, checked against the world (pure Python)
redistribution/  who computes which item and which rows travel where (pure Python)
states           one Megatron parallel_state per module, switched online; rng beside it
exchange         one all-to-all-v per plan, bytes counted
adapters/        how a host model names its items and takes its embeddings
session          the modules of one job together: build, DDP, optimizer
batches          the step's raw batches, read ahead and handed to the stock schedule
macrobatches     one encoder's part of a step; encode and output_cache are its two ends
encoder_schedule  when its macro-batches are encoded and taken back (memory modes)
phases           encode, the stock schedule, encoder backward
"""
