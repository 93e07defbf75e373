"""Contains what the package needs of the operating system: files, processes, machine facts, nsys, plugins, workers."""
