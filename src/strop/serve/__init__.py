"""What strop serves over HTTP. This room reads run directories, through `tracking`."""
