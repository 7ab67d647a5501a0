"""Predicted against measured step times of models that no curve was measured for."""
