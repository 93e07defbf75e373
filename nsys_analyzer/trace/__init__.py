"""Reads captures of nsys and PyTorch's profiler into typed columns. Only this room reads or writes tables."""
