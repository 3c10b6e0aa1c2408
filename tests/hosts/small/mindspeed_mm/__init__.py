"""A small host with the structure of MindSpeed-MM's training package; nothing of its code."""
