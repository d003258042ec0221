"""Tensors that are sharded over the devices of a stage: what goes between them, and ops that need all of them."""
