"""Many simulated runs: a grid of them, on this machine or on a cluster, and the table of what came out."""
