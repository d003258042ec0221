"""Collectives and point-to-point communication of tensors and objects between ranks."""
