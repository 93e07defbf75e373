"""NVTX ranges: phases, their instances, paths, and phases that no range names."""
