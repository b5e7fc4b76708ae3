"""From a graph of all stages to the graph of one rank, which is a process with some of them."""
