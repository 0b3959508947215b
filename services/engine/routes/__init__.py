"""The HTTP routes, a module a family."""
