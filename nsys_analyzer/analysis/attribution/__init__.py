"""The launch, ranges and process that each kernel belongs to."""
