"""Say what is to be trained: strategy, batches, optimizer, precision, the loader that feeds it."""
