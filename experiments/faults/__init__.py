"""Clusters under faults that nobody thought of, and how soon they recover from those that everybody knows."""
