"""What training takes on devices that nobody has measured yet: from datasheets, curves of efficiency and the shape of the model.

Read in this order: `transformer` (what is computed), `setup` and `software` (how), `kernels` (as which kernels), `roofline` (their
seconds on a device), `network` (seconds of collectives), `passes` (a layer with both), `step` (all of it played), `footprint` (bytes),
`prediction` (both for a kind of device). What datasheets do not say stands in the YAML files beside, with where it is known from.
"""
