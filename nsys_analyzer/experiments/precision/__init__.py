"""``nsys-analyze bench precision``."""
