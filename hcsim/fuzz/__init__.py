"""A search for clusters that do what they must not, or stop doing what they must: random homes under random faults."""
