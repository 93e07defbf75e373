"""Runs a Python program under ``torch.profiler``: for a machine without nsys, or without a GPU."""
