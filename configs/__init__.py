"""What the user asked for and what was decided. Standard library and msgspec."""
