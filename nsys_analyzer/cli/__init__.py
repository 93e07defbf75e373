"""The command line. Each command has a module, which parses the options, calls the library and prints the result."""
