"""Prometheus metrics of every process."""
