"""A cluster in one thread: the real services under a virtual clock, faults from a seed."""
