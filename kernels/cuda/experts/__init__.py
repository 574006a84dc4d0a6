"""Products with the weights of a mixture of experts."""
