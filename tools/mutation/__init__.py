"""Measure how many small faults in the product the tests find (`make mutation`)."""
