"""Speak the formats of schedulers and launchers: what they ask, and what they are told."""
