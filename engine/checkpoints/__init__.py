"""Reads models from files: GGUF and Hugging Face directories, in Hugging Face's terms."""
