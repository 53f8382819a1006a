"""GGUF files, what llama.cpp runs, as model directories: config.json, tokenizer.json and what weights are called."""
