"""Two runs side by side: what changed, whether that is more than chance, and what explains it."""
