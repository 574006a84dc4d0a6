"""Reads Hugging Face model directories."""

from pdserve.engine.checkpoints.hf.checkpoint import DirectoryCheckpoint
