"""Turn operator calls into seconds on one machine.

In: a bound graph and a profile. Out: `durations.op_durations`, each with its source and error:
measured; fitted to the probe's kernels (`fits`); or by the datasheet (`roofline`,
`datasheet_model`). `host` adds what issuing costs, `contention` what caches and neighbours cost.
"""
