"""Ways of moving weights between processes. `shared` needs none: there is nothing to move."""
