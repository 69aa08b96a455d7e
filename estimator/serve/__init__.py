"""Answer over HTTP: estimates, tables, plans and observations of graphs that were uploaded."""
