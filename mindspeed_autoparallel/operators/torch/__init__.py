"""The part of operator search that imports torch: capture of modules, and execution of plans."""
