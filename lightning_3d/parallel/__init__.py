"""The plan of a module's parallelisms, and the module with those that were applied."""
