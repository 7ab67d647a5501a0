"""Reproducible studies: each module runs on its own with `python -m experiments.NAME`."""
