"""The search over layouts of one pipeline: enumeration, solution of each, proof of the best.

space          every layout: legal, or with the reason it is not
bounds         cheap lower bounds of a layout's step
layout_solver  the best split of one layout, with the least recomputation among equally fast plans
tasks          work on one layout, as plain JSON values
workers        processes that share tasks
layout_search  the next layout to solve, and the outcome of each
search         the whole search
relaxations    gains of the best plan if a limit moved
assembly       the plan file
"""
