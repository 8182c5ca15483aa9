"""The viewer of runs: a local web page that reads run directories, live while they are written.

`app.build(roots)` makes the application; `catalog` is the only place that turns a name into a path.
"""
