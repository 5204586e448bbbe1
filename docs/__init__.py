"""The documents, and what makes those that nobody types: ``python -m docs.make_...``."""
