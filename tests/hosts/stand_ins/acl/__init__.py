"""Stand in for CANN's acl on a machine without NPU: MindSpeed-LLM asks it for the chip alone."""


def get_soc_name() -> str:
    """Name the chip whose code paths a CPU can follow."""
    return "Ascend910B1"
