"""The exact search over plans.

wanted            one function that runs every search a training requests
best_first        the loop and the proof that all searches share
layouts           the search over layouts of one pipeline
hetero            the search over encoders with layouts of their own
tuner             the search over traced configurations of --auto-tuning
split             the exact split of one pipeline's layers
problem_building  a layout and a profile as a split problem
problem_messages  the messages between its stages
candidate         a layout that may be solved
placement         layers and recomputation by stage
variable_data     samples of unequal size
spread            plans judged by a distribution of samples
evaluate          step time and memory of one placement
results           the files that a search writes
replay            prices a plan file again
"""
