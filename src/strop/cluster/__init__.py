"""Where the parts of a run are: processes, nodes, and how a run gets onto them."""
