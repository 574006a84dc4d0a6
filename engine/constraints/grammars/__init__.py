"""Grammars: compiled in a sandbox first, then here on threads, and matched by llguidance."""
