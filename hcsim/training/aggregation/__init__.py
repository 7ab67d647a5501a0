"""Gradient aggregation: one exchange for each kind of compressor."""
