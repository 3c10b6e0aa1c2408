"""Lower bounds: relaxations, whole layers per rank, prices, and paths through ranges of layers."""
