"""Compares the time of each operator with the time that it should take, and explains the difference."""
