"""What ``examples/README.md`` states, computed from the committed rows."""
