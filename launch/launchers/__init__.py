"""Other systems that start one process per node: what they are given, and where its process finds its place."""
