"""Broken, hostile and odd inputs for every command: ``python -m tests.fuzz``."""
