"""Trainers of other libraries on top of `hd.distribute`, one module each, imported only by those who use them."""
