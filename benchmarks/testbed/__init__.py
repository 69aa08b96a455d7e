"""A real cluster on one Linux machine: network namespaces joined by links of set rates.

Needs root, iproute2 and util-linux. A link's rate is its line rate each way, of which TCP carries
1448/1514; nodes hang on racks, switches with an uplink to the spine, or on the spine itself::


    bed_description = TestbedDescription.uniform(nodes=4, devices=2, uplink="500 Mbit/s")
    with testbed(bed_description) as bed:
        outputs = launch(bed, "n0[0]+n1[0]", [sys.executable, "-m", "estimator.probe"])
        step_s = measure(bed, "paced:few_big", "n0[0,1]+n1[0]", strategy="ddp:view")

The sum of all uplinks should stay below 8 Gbit/s: beyond, two cores measure themselves.
"""
