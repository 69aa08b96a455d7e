"""What an estimate record asks of any version of the package, and how two records compare."""
