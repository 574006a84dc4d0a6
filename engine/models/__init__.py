"""Models as lists of parts, and the decoders that compute them."""
