"""The router service: places each request on workers, and on other workers if these fail."""
