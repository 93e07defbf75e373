"""Measures two programs in turns, and records predicted and measured savings."""
