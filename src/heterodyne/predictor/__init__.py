"""What training takes on devices that nobody has measured yet: from datasheets, curves of efficiency and the shape of the model.

Read in this order: `transformer` (what is computed), `setup` and `software` (how), `kernels` (as which kernels), `roofline` (their
seconds on a device), `network` (seconds of collectives), `passes` (a layer with both), `layer_bytes` (what it holds), `layer_costs` (the
table of all that, which `search.fleet` makes steps of). What datasheets do not say stands in the YAML files beside, with where it is known
from.
"""
