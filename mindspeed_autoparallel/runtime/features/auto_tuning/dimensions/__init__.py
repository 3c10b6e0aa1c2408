"""Which dimensions are searched on this host, and why the others are not.

``planning``    all of them together: ``plan_search``
``context``     the context of every dimension: request, parsed arguments, device, and where reasons go
``sizes``       tensor, sequence, context, expert parallel, micro batch: the points that are traced
``variants``    one way to run the same layers, as Megatron's arguments; which points it is traced at
``attention``   variants of attention over context ranks
``experts``     ways of experts: dispatcher, rearrangement of tokens, expert tensor parallel
``recompute``   what is thrown away in forward and computed again in backward
``switches``    optimizer and communication: what the cost model covers without a trace
``unsearched``  what is left out everywhere, with the reason
"""

from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.planning import SearchPlan, plan_search

__all__ = ["SearchPlan", "plan_search"]
