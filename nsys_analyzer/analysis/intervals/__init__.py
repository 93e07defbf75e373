"""Intervals of integers: several groups on one axis, stacks of ranges, unions."""
