"""Processes and what they share: mesh, groups, messages, random streams, shards."""
