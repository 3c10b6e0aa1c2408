"""Block costs of the host's own model, measured in the host's own forward and backward.

``structure`` finds the repeated layers of whatever model was built; ``recorder`` marks time and memory at their
boundaries; ``costs`` turns marks into block costs; ``state`` counts parameters, gradients and optimizer state;
``worker`` runs inside a process this package launched, and goes through several layouts in one launch.
"""
