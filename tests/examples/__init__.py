"""Computes the statements of ``examples/README.md`` from the committed rows."""
