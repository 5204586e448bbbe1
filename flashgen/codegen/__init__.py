"""From a plan to source text."""
