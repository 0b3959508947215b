"""What the services share, one idea a module. Never imports a service."""
