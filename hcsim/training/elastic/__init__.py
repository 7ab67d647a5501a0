"""Training that goes on while members crash, pause, leave and join."""
