"""``nsys-analyze bench variants``."""
