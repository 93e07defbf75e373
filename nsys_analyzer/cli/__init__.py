"""The command line: a module for each command; parses, calls the library, prints."""
