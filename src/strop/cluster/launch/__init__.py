"""What `strop launch` writes: the script or the manifest that runs a recipe on a cluster."""
