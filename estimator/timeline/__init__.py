"""Turn a graph and machine profiles into when each thing runs."""
