"""Probe devices together, of one node or of many: every rank runs the same steps.

`cluster_probe` is rank 0's side and the place to begin, `rank` every rank's; `steps` is the plan,
whose steps all ranks run in a `group`, on one node (`run_on_node`) as on many; `findings` collects.
`discovery` finds the launch's ranks and secret, `signed_store` lets nobody else be heard.
"""

import os

# Before torch is imported: its warnings about hosts without a name service, or about rank 0's end,
# would stand between the sentences of the probe.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
