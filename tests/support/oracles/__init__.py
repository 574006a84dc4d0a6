"""Compute or check the right answer without the code under test."""
