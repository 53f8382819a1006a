"""Starting ranks and the front, watching them, and ending them together."""
