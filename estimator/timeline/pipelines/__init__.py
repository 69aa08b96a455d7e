"""Pipeline parallelism: `stage_plans` plans each stage, `simulation` plays the passes."""
