"""Grammars: tried in a process of their own, compiled on threads, followed by matchers."""
