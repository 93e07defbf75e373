"""Annotates a PyTorch program from outside: ranges around its steps and phases, their times, and the capture range.

``environment`` is the side of ``nsys-analyze run``. ``injected`` is a folder for ``PYTHONPATH``, through which Python
loads ``hooks`` in the program's process. The program's Python may be another one, without this package: ``hooks`` needs
nothing but PyTorch.
"""
