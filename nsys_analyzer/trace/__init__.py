"""Reads captures of nsys and PyTorch's profiler into typed columns. Only this package reads or writes tables."""
