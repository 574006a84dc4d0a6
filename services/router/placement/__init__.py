"""The placement policy, and the facts that it decides by."""
