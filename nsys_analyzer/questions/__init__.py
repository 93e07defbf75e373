"""Answers single figures by their names, and checks the claims of a text against them."""
