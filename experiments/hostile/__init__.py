"""Hostile inputs: everything that reads bytes from outside, and millions of inputs that are nearly right."""
