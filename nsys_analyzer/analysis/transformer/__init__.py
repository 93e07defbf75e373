"""Transformers: sizes of models, FLOPs and bytes, attention, and peaks of GPUs."""
