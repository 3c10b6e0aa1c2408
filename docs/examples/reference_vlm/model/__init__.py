"""Qwen2-VL out of megatron-core's blocks; module and parameter names as in MindSpeed-MM's checkpoints."""
