"""Planning again after nodes were lost or added: the best plan for the new cluster, and the cost of the move."""
