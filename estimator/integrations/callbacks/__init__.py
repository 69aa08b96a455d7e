"""Watch trainings: compare what was predicted with what was measured, and keep it.

`training` serves plain loops and Accelerate; `lightning` and `transformers` their trainers.
"""
