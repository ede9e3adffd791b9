"""The commands: training, planning and inspection from the command line."""
