"""How Rollstream talks to inference servers: dialects found by asking, endpoints, limits."""
