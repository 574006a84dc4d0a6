"""Runs the steps that the scheduler plans: batch, forward pass, sampling."""
