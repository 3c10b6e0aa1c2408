"""Records in MindSpeed-MM's mllm format -> tokens, patches and mel frames -> microbatches."""
