"""Hand results to other tools, in their formats."""
