"""The best parallel plan over pools of alike devices: pipeline templates, the number of replicas of each, and the alternatives."""
