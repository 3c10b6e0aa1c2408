"""Plans for data whose samples differ: steps wait for the slowest replica, memory must hold the batches that come.

factors         how much longer and larger a module is for a sample than at the profile's point
scaled          a profile at the mean sample
draws           global batches drawn from the distribution
drawn_steps     steps of a plan over drawn global batches, in order and rearranged
waiting         which layouts are worth drawing
memory          how likely a rank runs out of memory within so many steps
choose          the best plans by means, judged by the distribution
"""
