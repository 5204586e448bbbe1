"""Tuning: the candidates, the model that ranks them, and the measured results."""
