"""Chat beyond Jinja: encodings of conversations, and parsers of what the model answers (calls of tools, reasoning)."""
