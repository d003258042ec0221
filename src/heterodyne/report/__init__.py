"""Tables and pictures of plans and runs."""
