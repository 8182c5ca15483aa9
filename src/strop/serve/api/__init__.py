"""`strop serve`: the REST service. Everything that needs FastAPI is imported where a service is made."""
