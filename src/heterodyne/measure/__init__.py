"""What this machine has, how fast it is, and what its links carry."""
