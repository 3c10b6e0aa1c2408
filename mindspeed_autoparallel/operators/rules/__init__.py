"""The axes that each operator may cut: one function per kind returns the axes and their dims in each tensor."""
