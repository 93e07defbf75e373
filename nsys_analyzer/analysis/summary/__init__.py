"""The figures of one capture, and what can be said of them."""
