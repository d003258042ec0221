"""How ranks exchange tensors and objects."""
