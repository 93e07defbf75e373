"""Records programs: nsys, the torch recorder, hooks into any program, and the jobs of a sweep."""
