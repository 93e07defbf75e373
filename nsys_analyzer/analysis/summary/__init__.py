"""The figures of one capture, and their warnings and verdicts."""
