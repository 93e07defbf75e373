"""Tracks: what the CPU's threads and the GPU's streams did in the measured steps, moment by moment."""
