"""Context-parallel attention without Transformer Engine: ranks gather keys and values, or exchange rows for heads.

``shards``            the positions of a sequence on each rank (zigzag as Megatron slices batches, or contiguous rows)
``context_parallel``  the attention module, a drop-in for Megatron's ``core_attention``
"""
