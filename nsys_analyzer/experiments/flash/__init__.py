"""``nsys-analyze bench flash``."""
