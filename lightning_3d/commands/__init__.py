"""What people type: training and looking at a module from the command line."""
