"""What was run: configuration, manifests, timings, and the captures of a folder."""
