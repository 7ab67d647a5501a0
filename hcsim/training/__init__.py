"""Training: tasks, gradient exchange, and the strategies that use them."""
