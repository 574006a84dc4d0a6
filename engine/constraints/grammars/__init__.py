"""Grammars: compiled first in a sandbox, then on threads, and matched by llguidance."""
