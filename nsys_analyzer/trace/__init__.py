"""Reads an Nsight Systems SQLite export into typed columns: the only SQL of the package."""
