"""What the tests of generated modules share: the variants, the cases, and what is right."""
