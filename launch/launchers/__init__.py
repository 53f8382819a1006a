"""Other systems that start one process per node: what they are given to start, and where its process finds its place."""
