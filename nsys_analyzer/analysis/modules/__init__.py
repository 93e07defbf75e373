"""The time of each module of a model, forward and backward."""
