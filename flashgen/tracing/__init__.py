"""What a user's function runs on while it is traced: symbolic values and their operations."""
