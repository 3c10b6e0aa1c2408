"""Block costs of the host's own model, measured in the host's own forward and backward.

``task``, ``worker``  the layouts of a launch, and their measurement in each of its processes
``relayout``       sets the host up again for the next layout
``structure``      finds the repeated layers of the built model and their kinds
``point``          measures one layout: ``recorder`` marks time and memory at block boundaries, ``costs`` turns the
                   marks into block costs, ``state`` counts parameters, gradients and optimizer state
``sampling``       microbatches that differ in size
``communication``  links between ranks, and the collectives of a rank that is measured alone
``steps``          whole steps, and short pipelines
"""
