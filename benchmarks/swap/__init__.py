"""Compare swap plans with published planners, an exact one, and a checker of its own."""
