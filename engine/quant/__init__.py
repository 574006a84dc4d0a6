"""Storage formats of weights: one module per family, `registry` finds and applies them."""
