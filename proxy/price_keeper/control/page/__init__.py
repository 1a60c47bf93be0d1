"""The status page: what it shows, who may see it, and how it stays up to date."""
