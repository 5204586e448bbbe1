"""What layers of models call attention by: masks as descriptions, and the modules for them."""
