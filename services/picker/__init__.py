"""The endpoint picker for a Kubernetes Gateway."""
