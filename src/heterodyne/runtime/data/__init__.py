"""Training data of every kind, in an order that no plan changes."""
