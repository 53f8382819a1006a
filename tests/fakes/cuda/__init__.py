"""A fake of cuda.core on the CPU: the names that the fake of nvshmem4py wants."""
