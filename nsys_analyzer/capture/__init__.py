"""Finds nsys, calls it, and reads what a run leaves beside its trace."""
