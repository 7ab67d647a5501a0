"""The virtual world: a deterministic simulation on SimPy, in which computing takes no virtual time by itself."""
