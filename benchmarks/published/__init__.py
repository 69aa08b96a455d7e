"""Map published step times to questions for the engine, and judge its answers."""
