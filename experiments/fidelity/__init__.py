"""The same job in both worlds, and the error of the prediction."""
