"""Small verifiers environments that need no network; loaded by the name of their folder."""
