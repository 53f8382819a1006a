"""GGUF files: what llama.cpp runs."""
