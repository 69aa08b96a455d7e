"""Lay out answers as tables for people, with rich, which starting a command does not need."""
