"""``nsys-analyze bench attention``, and what it shares with ``flash`` and ``variants``."""
