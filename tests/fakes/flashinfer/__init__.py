"""A fake of FlashInfer for the CPU: parts of it by the names of its modules."""
