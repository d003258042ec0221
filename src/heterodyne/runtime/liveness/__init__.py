"""Whether all workers live and go on, and who is at fault if not."""
