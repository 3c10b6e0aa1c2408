"""Plans for data whose samples differ: steps wait for the slowest replica, memory must hold the batches that come.

factors time and memory of a module for a sample, relative to the profile's point scaled a profile at the mean sample
draws global batches drawn from the distribution drawn_steps steps of a plan over drawn global batches, in order and
rearranged waiting the layouts worth drawing memory the probability of running out of memory within so many steps choose
the best plans for the mean sample, evaluated on the distribution
"""
