"""Where ranks run: allocations, clusters and their links, meshes and process groups."""
