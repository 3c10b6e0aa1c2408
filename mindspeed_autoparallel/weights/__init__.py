"""Checkpoints that follow a plan: names and layouts as data, streaming readers and writers, conversion.

A *canonical* tensor has its Megatron name with the layer counted over the whole model, is whole (not cut by tensor
parallelism) and has no vocabulary padding. Readers return canonical tensors and writers accept them, so every reader
works with every writer: Hugging Face safetensors, ``torch_dist``, and the ``mp_rank_*`` folders of MindSpeed-MM and
of Megatron.

    families       the tables of names and shapes, and their assignment to families
    architecture   the model of config.json; its rules, one per tensor
    names          the definition of a rule, and the forms of Hugging Face names
    spelling       the names that one tensor has in checkpoints of different hosts
    layouts        layers per stage and tensor parallel size per module
    placement      the chunk and local name of each canonical tensor
    tensors        interleaving, cutting and joining; the arithmetic of the table
    huggingface, rank_folders, torch_dist            one reader each
    huggingface, rank_writing, dist_writing          one writer each
    folders        a result folder appears whole or not at all
    conversion     the three commands
"""
