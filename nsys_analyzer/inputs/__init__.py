"""Gathers what a report is made from: captures, manifests, unprofiled times and rows of experiments."""
