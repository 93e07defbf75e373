"""Ranks: what each did, step by step, and what several of one run did together."""
