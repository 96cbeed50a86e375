"""The one loop that runs every transform service, and what all services start with."""
