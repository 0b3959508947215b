"""The deployables: each folder is one service, a small pure step plus a thin `__main__`."""
