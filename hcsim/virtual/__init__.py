"""The seam on SimPy: a deterministic world in which time costs nothing."""
