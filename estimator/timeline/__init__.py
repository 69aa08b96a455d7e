"""Turn durations into when each thing runs, and so into the time of a step.

In: a graph, a placement, a strategy. Out: `plan.step_plan`, `plan.answer_of`, a `plan.Breakdown`.
`simulated` lists its spans, `assumptions` says in sentences what it takes for granted. Rooms:
`collectives` (cost of one), `simulator` (tasks on lanes), `rank` (a rank's program), `strategies`
(one file each), `pipelines`.
"""
