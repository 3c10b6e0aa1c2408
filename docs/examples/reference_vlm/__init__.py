"""The reference multimodal training: Qwen2-VL built from megatron-core's own blocks, trained by ``megatron.training``.

It reads MindSpeed-MM's model.json, data.json and tools.json, and replaces MindSpeed-MM if that is missing.
"""
