"""What each operator may cut: one function per kind of operator, giving the axes and where they sit in each tensor."""
