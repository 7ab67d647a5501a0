"""How a model learns: tasks, what is sent of a gradient, and the strategies that send it."""
