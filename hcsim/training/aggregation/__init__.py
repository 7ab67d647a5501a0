"""What crosses the network of a gradient: one exchange for each kind of compressor."""
