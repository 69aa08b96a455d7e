"""Pipeline parallelism: the order of passes on each rank, and when each of them ends."""
