"""Where the parts of a run are: Ray actors, their placement and supervision, and how data gets to them."""
