"""Speak the formats of schedulers: Kubernetes and Volcano, Slurm, SkyPilot, elastic launchers."""
