"""Learn from some rows of tables of measured steps and predict the others."""
