"""Copies of captures that may leave the machine, without what is private."""
