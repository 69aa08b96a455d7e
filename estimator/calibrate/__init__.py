"""Learn from observed steps, and the forms of other systems to compare with."""
