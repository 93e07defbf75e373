"""NVTX ranges: phases and their instances, phases inferred without ranges, and calls of modules."""
