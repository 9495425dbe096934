"""Start a program on this machine or a cluster, behind one contract, on engines that exist."""
