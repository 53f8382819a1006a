"""A fake of nvshmem4py on the CPU: the part of nvshmem.core that adapters use, for PEs that are threads of one process."""
