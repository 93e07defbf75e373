"""Compares runs: what changed, whether the change is more than chance, and what explains it."""
