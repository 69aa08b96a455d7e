"""Slots in other tools: training frameworks, schedulers, trace viewers, executors."""
