"""The kernel table: class and precision of each kernel."""
