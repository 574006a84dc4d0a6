"""Reads Hugging Face model directories."""
