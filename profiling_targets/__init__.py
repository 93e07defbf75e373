"""Instrumented programs that a person can run alone."""
