"""What to do with a home of Macs: how to train a model on it soonest, why, and what would make it faster."""
