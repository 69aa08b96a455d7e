"""A real cluster on one Linux machine: network namespaces joined by links of set rates.

Needs root, iproute2 and util-linux. A testbed is described in a small TOML file::

    [racks.r1]                  # a switch with an uplink to the spine; may be left out
    uplink = "1 Gbit/s"
    [nodes.n0]
    devices = 2
    uplink = "500 Mbit/s"       # line rate each way; TCP carries 1448/1514 of it
    rack = "r1"                 # without it the node hangs on the spine
    slowdown = 1.5              # computes 1.5 times as long; 1 if left out
    [nodes.n1]
    devices = 1
    uplink = "500 Mbit/s"

From Python::

    bed_description = TestbedDescription.uniform(nodes=4, devices=2, uplink="500 Mbit/s")
    with testbed(bed_description) as bed:
        outputs = launch(bed, "n0[0]+n1[0]", [sys.executable, "-m", "estimator.probe"])
        run = measure(bed, "paced:few_big", "n0[0,1]+n1[0]", strategy="ddp:view")

The sum of all uplinks should stay below 8 Gbit/s: beyond, two cores measure themselves.
"""
