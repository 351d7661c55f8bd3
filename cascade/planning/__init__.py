"""Which levels pay, with which K, before anything is served: what `cascade plan` does, for programs.

`measuring` lets an engine answer questions once; `planner` simulates every set of levels on that (`search`) and says
what each is worth (`figures`); `hardware` and `what_if` are the costs of machines that nobody has; `source` writes the
configuration.
"""

from cascade.planning.measuring import Measured, measure
from cascade.planning.planner import Plan, plan

__all__ = ["Measured", "Plan", "measure", "plan"]
