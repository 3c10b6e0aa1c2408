"""Qwen2-VL built from megatron-core's blocks; module and parameter names as in MindSpeed-MM's checkpoints."""
