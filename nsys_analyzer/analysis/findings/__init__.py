"""Findings: the causes that make steps longer. Rules find them, and the diagnosis ranks them."""
