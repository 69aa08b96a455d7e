"""Read what other tools have measured or described of a machine.

`files.read_imports` tells formats apart by content: `bandwidths` (nccl-tests, nvbandwidth,
perftest), `topologies` (NCCL, nvidia-smi, Slurm); `findings` joins them into a profile.
"""
