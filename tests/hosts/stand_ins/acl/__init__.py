"""Stand in for CANN's acl on a machine without NPU: MindSpeed-LLM only reads the chip's name from it."""


def get_soc_name() -> str:
    """Name the chip whose code paths a CPU can follow."""
    return "Ascend910B1"
