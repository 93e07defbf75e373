"""The commands of nsys-analyze, one module each."""
