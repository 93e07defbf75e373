"""``nsys-analyze bench memory``."""
