"""Reads traces of PyTorch's profiler (Kineto) into the tables of an nsys export."""
