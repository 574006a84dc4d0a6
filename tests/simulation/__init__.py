"""A cluster in one thread: the real services under a virtual clock, with faults drawn from a
seed."""
