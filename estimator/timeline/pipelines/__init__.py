"""Pipeline parallelism: `stage_plans` plans each stage, `simulation` runs the passes."""
