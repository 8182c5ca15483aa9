"""What runs inside of a sandbox. Standard library only: nothing here may import strop, which is not there.

The folder is mounted as it is and its files are imported as top-level modules (`runner`, `programs`, `plain`, `peer`).
The host imports `plain` too, as `strop.sandbox.inside.plain`.
"""
