"""Tracing: symbolic values, with which a user's function is called, and their operations."""
