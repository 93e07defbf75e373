"""Evaluates the questions of an agent, and tests the server that answers them."""
