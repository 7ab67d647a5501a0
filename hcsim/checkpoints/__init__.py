"""Checkpoints of torch programs: whole or not at all, written beside the training, read by any number of ranks."""
