"""Answers what fills the memory of a GPU, from a memory snapshot of PyTorch."""
