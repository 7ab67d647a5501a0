"""What happened: one event schema for both worlds."""
