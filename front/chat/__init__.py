"""Encodings of conversations that are no Jinja templates (front/chat_template.py renders those)."""
