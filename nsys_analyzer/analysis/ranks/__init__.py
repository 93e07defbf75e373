"""Analyzes runs of several ranks: joins the records of ranks, and finds where ranks lose time."""
