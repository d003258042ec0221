"""From a graph, a cluster and a profile to the best plan that is found, with reasons."""
