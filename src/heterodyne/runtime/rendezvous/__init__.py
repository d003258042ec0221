"""How workers find each other: their environment, the store of the run, and the frame around a worker's life."""
