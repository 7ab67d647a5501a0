"""A cluster that trains for hours while faults strike it: what it keeps of its speed, and what must always hold."""
