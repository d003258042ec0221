"""How the workers of a job find, watch and talk to each other."""
