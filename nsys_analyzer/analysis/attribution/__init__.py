"""Which launch, range and process each kernel belongs to."""
