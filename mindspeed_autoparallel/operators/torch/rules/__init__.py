"""What each aten operator of an exported graph may cut: its axes, and where they sit in every operand."""
