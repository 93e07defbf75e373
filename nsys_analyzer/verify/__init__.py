"""Measures two programs in turns, and records the predictions and the measurements."""
