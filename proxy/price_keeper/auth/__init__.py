"""Who calls: tokens and the keys they are signed with, clients and their secrets, the credentials endpoint."""
