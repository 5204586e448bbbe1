"""Which configuration to ship: the candidates, the model that ranks them, what was measured."""
