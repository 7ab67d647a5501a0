"""Checkpoints of torch programs: atomic, written in the background, and readable by any number of ranks."""
