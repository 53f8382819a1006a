"""From text to tokens and back: the tokenizer, what it says of itself, and the chat templates of Hugging Face."""
