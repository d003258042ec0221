"""Which weights a rank holds, and their gradients, updates and whole state."""
