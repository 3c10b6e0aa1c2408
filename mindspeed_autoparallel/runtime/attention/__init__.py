"""Context-parallel attention without Transformer Engine: keys and values are gathered, queries stay where they are.

``shards``            who holds which positions of a sequence (zigzag as Megatron slices batches, or contiguous rows)
``context_parallel``  the attention module, a drop-in for Megatron's ``core_attention``
"""
