"""Tools around a training: plans and their prices, the dry run, pictures, the commands. The core imports none."""
