"""The operator graph, free of torch: nodes with named axes, placements, and redistribution between placements."""
