"""Train one PyTorch model on accelerators of different power."""
