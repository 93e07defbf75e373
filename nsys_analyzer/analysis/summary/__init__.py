"""The figures of one process of a capture, and the warnings about them."""
