"""`pdlaunch bench`: transfer modes of one recipe against each other, on one machine, in one run."""
