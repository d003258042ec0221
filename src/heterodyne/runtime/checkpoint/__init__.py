"""What is kept of a training run, whole or not at all."""
