"""Events and metrics: one schema for both worlds."""
