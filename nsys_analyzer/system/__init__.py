"""Atomic writes, processes, strict JSON, and the nsys programs of this machine."""
