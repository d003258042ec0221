"""What makes unequal parts add up to the mathematics of one device."""
