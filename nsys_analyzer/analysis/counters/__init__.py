"""Measures what the hardware counters of a GPU show about phases, kernel classes, modules and operators."""
