"""The files of runs: configuration, manifests, timings, and the captures of a folder."""
