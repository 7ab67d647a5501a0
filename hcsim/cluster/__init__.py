"""Cluster membership: discovery, failure detection, agreement on views, and diagnosis of stragglers."""
