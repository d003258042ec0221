"""Text as training data, in an order that no plan changes."""
