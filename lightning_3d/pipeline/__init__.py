"""Pipeline parallelism for an unchanged `training_step`. `parallelize.parallelize` calls it.

All ranks of a pipeline must have the same batch and the same default random seed, and call the same methods in order.

The differences to one process:

- `training_step` runs once per microbatch and stage. Its effects happen that often, except for computing, logging and
  metrics.
- Batch norm normalizes over a microbatch.
- Dropout draws other masks: the same ones for any number of stages.

With one block there is nothing to cut, and the step runs as on one device.
"""
