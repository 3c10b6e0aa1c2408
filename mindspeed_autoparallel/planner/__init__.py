"""The exact search over plans.

wanted            all searches behind one function, for what a training wants at once
best_first        the loop that all searches share, and what it proves
layouts           the search over layouts of one pipeline
hetero            the search over encoders with layouts of their own
tuner             the search over traced configurations of --auto-tuning
split             the exact split of one pipeline's layers
problem_building  a layout and a profile as a split problem
problem_messages  what its stages send one another
candidate         a layout that may be solved
placement         layers and recomputation by stage
variable_data     samples of unequal size
spread            plans judged by a distribution of samples
evaluate          step time and memory of one placement
results           the files that a search writes
replay            a plan file priced again
"""
