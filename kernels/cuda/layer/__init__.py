"""Operations between the products of a layer: norms, rope, activations."""
