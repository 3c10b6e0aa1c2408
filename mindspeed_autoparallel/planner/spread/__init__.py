"""Plans for data with samples of unequal size: steps wait for the slowest replica, and memory must hold any batch.

factors          time and memory of a module for a sample, relative to the profile's point, also fitted to measurements
scaled           a profile at the mean sample
draws            global batches drawn from the distribution
drawn_steps      steps of a plan over drawn global batches, in order and rearranged
waiting          the layouts worth drawing
rank_bytes       bytes of a plan's pipeline ranks by sample factors
memory           the probability of running out of memory within a number of steps
arranged         bounds of that probability for rearranged batches; ``drawn_failures``: by drawing
samples          the samples, and plans judged on them
choose           the best plans for the mean sample, evaluated on the distribution
interrupted      the best plan so far of an interrupted choice
others           the next best layouts, and the record of the search, of a plan chosen by drawn steps
hetero_choice    the same for hetero and homogeneous plans, and the drawn steps of a hetero plan
"""
