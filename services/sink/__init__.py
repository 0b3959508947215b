"""The end of each routing: files, reports, and the trainer's API."""
