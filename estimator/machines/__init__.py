"""What was measured of machines.

In: JSON files, shipped (`data/machines`), probed or imported. Out: a checked `MachineProfile`.
`catalogue.load_profile` finds one by name; `profile` and `measurements` hold it; `typical` stands
in for what nobody measured; `comparison` sets two side by side, `merging` puts several together;
`prices` says what renting them costs.
"""
