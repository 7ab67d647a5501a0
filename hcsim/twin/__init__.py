"""The twin of a home: a scenario whose figures were measured, and the record of how well it predicts."""
