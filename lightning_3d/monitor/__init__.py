"""`Monitor3D`: speed, shares of a step, memory, and warnings while a job trains."""
