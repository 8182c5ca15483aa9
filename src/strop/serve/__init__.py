"""The service and the viewer: read run directories, start runs as processes."""
