"""``nsys-analyze bench timing``."""
