"""A cluster of unequal workers on one machine, made by the operating system."""
