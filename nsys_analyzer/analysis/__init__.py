"""Pure functions on arrays and frames: attribution, intervals, phases, kernel classes, FLOPs."""
