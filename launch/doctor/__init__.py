"""What is wrong with a machine, or between machines, before a server is started on them."""
