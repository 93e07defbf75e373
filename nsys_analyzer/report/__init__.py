"""The report as data, and one renderer for each output format."""
