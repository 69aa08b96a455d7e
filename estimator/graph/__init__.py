"""Describe what a model does in one training step: operators, shapes, costs, memory."""
