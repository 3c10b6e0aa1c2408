"""Block costs of the host's own model, measured in the host's own forward and backward.

``task``, ``worker``  the layouts of a launch; measures them in each process of the launch
``relayout``       sets the host up again for the next layout
``structure``      finds the repeated layers of the built model and their kinds
``point``          measures one layout: ``recorder`` marks time and memory at block boundaries, ``costs`` makes block
                   costs of the marks, ``state`` counts parameters, gradients and optimizer state
``sampling``       microbatches that differ in size
``communication``  links between ranks, and the collectives of a rank that is measured alone
``steps``          whole steps, and short pipelines
"""
