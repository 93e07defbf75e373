"""``nsys-analyze bench compile``."""
