"""Probe a GPU, train real models on it, and set predictions beside what was measured."""
