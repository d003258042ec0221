"""Tensors that lie in parts on the devices of a stage: what goes between them, and ops that need all of them."""
