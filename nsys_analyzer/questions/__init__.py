"""Answers questions about single figures, and checks the statements of a text against the figures."""
