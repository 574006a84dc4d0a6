"""Decides what each step computes, and who owns which KV blocks."""
