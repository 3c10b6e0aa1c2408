"""The search over layouts of one pipeline: which there are, how each is solved, and which is proved best.

space          every layout, legal or with the reason why not
bounds         cheap lower bounds of a layout's step
layout_solver  the best split of one layout
tie_break      of equally fast plans the one that recomputes least
tasks          work on one layout as plain values
workers        processes that share tasks
layout_search  what to solve next, and what became of every layout
search         the whole search
relaxations    what the best plan would gain if a limit moved
assembly       the plan file
"""
