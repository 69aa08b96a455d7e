"""Observe the steps of training frameworks, and set what was predicted beside what was measured."""
