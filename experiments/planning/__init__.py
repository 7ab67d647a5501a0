"""How good are plans? Their choice against the best of all candidates, and how fast methods learn."""
