"""The arithmetic of transformers: models, FLOPs, bytes, attention, hardware limits."""
