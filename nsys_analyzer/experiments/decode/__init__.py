"""``nsys-analyze bench decode``."""
