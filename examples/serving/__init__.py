"""The parts of examples/serve.py: pages, a scheduler, a model, and attention to cached keys."""
