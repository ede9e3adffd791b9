"""Pipeline parallelism for an unchanged `training_step`. `parallelize.parallelize` calls it.

All ranks of a pipeline must have the same batch and the same default random seed, and call the same methods in order.

With one block there is nothing to cut, and the step runs as on one device.
"""
