"""The reference multimodal training: Qwen2-VL out of megatron-core's own blocks, trained by ``megatron.training``.

It reads MindSpeed-MM's model.json, data.json and tools.json, and stands in for MindSpeed-MM where that is missing.
"""
