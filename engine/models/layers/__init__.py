"""The parts of a model on torch: one class for each kind of part."""
