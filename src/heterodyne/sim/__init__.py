"""What should happen: a clock and resources, and the program played on them."""
