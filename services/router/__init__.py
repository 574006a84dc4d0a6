"""The router: chooses workers for requests, and fails over to others."""
