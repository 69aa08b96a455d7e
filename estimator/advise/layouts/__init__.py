"""Which layout trains fastest: `candidates` with their least cost, `search` ranks them."""
