"""Contains the package's access to the operating system: files, processes, machine facts, nsys, plugins, workers."""
