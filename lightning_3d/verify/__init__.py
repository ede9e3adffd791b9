"""Checks of a running training: the first step against the unsplit module, replicas against each other."""
