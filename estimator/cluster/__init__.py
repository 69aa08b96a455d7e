"""Replay jobs on a described cluster under a scheduling policy."""
