"""Clusters under faults that nobody thought of: does what must always hold, hold?"""
