"""The axes that each aten operator of an exported graph may cut, and their dims in every operand."""
