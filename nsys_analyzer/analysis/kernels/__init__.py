"""Kernels: the class, the precision and the short label that follow from a name."""
